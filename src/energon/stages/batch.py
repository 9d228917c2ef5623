"""Make batches of consecutive items, or of the rows that a blend draws from one dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from energon.errors import check_at_least
from energon.samples.collate import BatchRows
from energon.samples.crude import (
    RestoreKey,
    carries_key,
    flat,
    key_of,
    sample_keys,
    split_key,
    stamp,
)
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemPlace,
    State,
    StateKind,
    unpack,
)
from energon.stages.hooks.hook import SKIPPED, ApplyIterator, Hook, reapply, runners_of
from energon.stages.lane import Lane, RowAddress
from energon.stages.map import row_of


@dataclass(frozen=True)
class BatchDataset(Dataset[Any]):
    """Make batches of consecutive items.

    Args:
        dataset: The items.
        batch_size: Number of items in a batch.
        hooks: Turn a list of items into a batch; without hooks, the list is the batch.
        drop_last: Whether to drop a smaller batch at the end of the data.
        unit: Name of the items in statistics.
        collates: Whether the first hook is the default one, which only collates.
    """

    dataset: Dataset[Any]
    batch_size: int
    hooks: tuple[Hook, ...] = ()
    drop_last: bool = False
    unit: str = "samples"
    collates: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, "batch_size", self.batch_size)

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _BatchIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        if items is None:
            return None
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return restore_batch(self.dataset, self.hooks, lane, key)


class BatchIterator(ApplyIterator):
    """Draws lists of items and runs hooks on them. Subclasses choose the items.

    Args:
        inner: The items.
        lane: The lane.
        hooks: The hooks.
        unit: Name of the items in statistics, which count those of batches that are passed on.
    """

    yields_batches = True

    def __init__(
        self, inner: DatasetIterator[Any], lane: Lane, hooks: tuple[Hook, ...], unit: str
    ) -> None:
        super().__init__(inner, lane)
        self.runners = runners_of(hooks, lane)
        self.unit = unit

    def _apply_to_batch(self, items: Any, row: int, *, repeated: int = 0) -> Any:
        """Return the result of the batch hooks for `items`, which may be collated already.

        Args:
            items: The items.
            row: A row of theirs.
            repeated: How many of the items repeat others, which statistics count apart.
        """
        lane, runners = self.lane, self.runners
        if isinstance(items, list):
            keys, first, count = None, key_of(items[0]), len(items)
        else:
            keys = items.__restore_key__
            first, count = keys[0], len(keys)
            runners = runners[1:]
            self.runners[0].succeed()
        address = batch_address(first, lane, row)
        number = lane.batch_number(address)
        key = partial(_batch_key, items, keys, number)
        batch = self._apply(items, runners, address, key)
        if batch is not SKIPPED:
            lane.counts[self.unit] += count - repeated
            if repeated:
                lane.counts["repeated"] += repeated
        elif self.unit == "packs":
            # Their samples were counted when they were packed.
            samples = chain.from_iterable(sample_keys(key_of(pack) or ()) for pack in items)
            lane.counts["samples"] -= sum(1 for _ in samples)
        return with_key(batch, key, count)


def _batch_key(items: Any, keys: Any, number: int) -> RestoreKey | None:
    """Return the key of a batch of `items`, whose keys are known if they are collated already."""
    keys = tuple(map(key_of, items) if keys is None else keys)
    return None if None in keys else ("batch", keys, number)


class _BatchIterator(BatchIterator):
    def __init__(self, stage: BatchDataset, lane: Lane) -> None:
        super().__init__(stage.dataset.open(lane), lane, stage.hooks, stage.unit)
        self.stage = stage
        # Samples wait for others before they are packed, and would keep the memory of batches.
        self.rows = BatchRows(0 if stage.unit == "packs" else stage.batch_size)

    def _produce(self) -> Any:
        stage, lane = self.stage, self.lane
        row = self.inner.row
        with self.rows:
            items, _ = self.inner.take(stage.batch_size, as_columns=stage.collates)
            if isinstance(items, list):
                while 0 < len(items) < stage.batch_size:
                    more, _ = self.inner.take(stage.batch_size - len(items))
                    if not more:
                        break
                    items += more
                if not items or (stage.drop_last and len(items) < stage.batch_size):
                    raise StopIteration
            lane.enter(row, several=True)
            batch = self._apply_to_batch(items, row)
            del items
            return self.rows.released(batch)


def batch_address(first: RestoreKey | None, lane: Lane, row: int) -> RowAddress:
    """Return the address that seeds the hooks of a batch.

    It is the key of its first sample or, without keys, its row in the lane.
    """
    return ("lane", lane.number, row) if first is None else ("batch", *flat(first))


def with_key(batch: Any, key: Callable[[], RestoreKey | None], count: int) -> Any:
    """Attach its key, if any, to a batch of `count` items, unless a hook has set one; return it.

    The list of the keys of the items, as collating creates it, is replaced. The key is computed
    only for a batch that can carry it.
    """
    own = key_of(batch)
    if carries_key(batch) if own is None else len(own) == count:
        made = key()
        if made is not None and (own is None or tuple(own) == made[1]):
            stamp(batch, made)
    return batch


def restore_batch(
    dataset: Dataset[Any], hooks: tuple[Hook, ...], lane: Lane, key: RestoreKey
) -> tuple[Any, RestoreKey]:
    """Recreate the batch of the items whose keys are in `key`, or one item by its own key."""
    split = split_key(key, "batch")
    if split is None:
        return dataset.restore(lane, key)
    keys, subs = split
    number: Any = None
    own: RestoreKey = ("batch", tuple(keys))
    if key[0] == "batch" and subs:
        number, subs = subs[0], subs[1:]
        own = (*own, number)
    with lane.recreating(number):
        items = [dataset.restore(lane, each)[0] for each in keys]
    with lane.recreating(number):
        address = batch_address(key_of(items[0]), lane, 0)
        batch, left = reapply(
            items, hooks, lane, address=address, key=own, subs=subs, yields_batches=True
        )
    return with_key(batch, lambda: own, len(items)), left


@dataclass(frozen=True)
class UnitBatchDataset(BatchDataset):
    """Make a batch of every unit of rows, even if hooks skip some of their samples.

    A batch therefore never mixes two units. It is smaller by the number of skipped samples, or
    repeats others, and is omitted if none remains. `drop_last` applies only to the end of the data.

    Args:
        unit_rows: Rows of a unit.
        repeats: Whether a batch repeats its samples, in their order, in place of skipped ones.
    """

    unit_rows: int = field(kw_only=True)
    repeats: bool = field(default=False, kw_only=True)

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _UnitBatchIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None else -(-items // self.batch_size)


class Units:
    """Divides items into units of rows.

    Args:
        inner: The items.
        rows: Rows of a unit.
        lane: The lane.
    """

    saves: ClassVar[Mapping[str, StateKind]] = {"inner": dict, "drawn_for": int | None}

    def __init__(self, inner: DatasetIterator[Any], rows: int, lane: Lane) -> None:
        self._inner, self._rows, self._current = inner, rows, lane.current
        lane.reading.unit_rows = max(rows, lane.reading.unit_rows)
        # The first item of the next unit, if it had to be drawn to detect the end of this one,
        # with its place, and the position and the batch for which it was drawn.
        self._held: tuple[Any, ItemPlace, State, int | None] | None = None
        self._drawn_for: int | None = None

    @property
    def row(self) -> int:
        """The row at which the next unit begins, or a row of that unit."""
        return self._inner.row if self._held is None else row_of(self._held[1])

    def position(self) -> State:
        """Return the position of the next unit."""
        if self._held is None:
            return {"inner": self._inner.state_dict(), "drawn_for": self._drawn_for}
        return {"inner": self._held[2], "drawn_for": self._held[3]}

    def go_to(self, position: State) -> None:
        """Move to a saved position."""
        inner, self._drawn_for = unpack(position, self.saves)
        self._inner.load_state_dict(inner)
        self._held = None

    def next(self) -> tuple[list[Any], list[ItemPlace], bool]:
        """Return the items of the next unit that is not empty, their places, and if it is last."""
        size, current = self._rows, self._current
        items: list[Any] = []
        places: list[ItemPlace] = []
        unit = -1
        while True:
            if self._held is None:
                if items and self._inner.row >= (unit + 1) * size:
                    return items, places, False
                before, batch = self._inner.state_dict(), current.batch
                if self._drawn_for is None:
                    item = next(self._inner, _END)
                else:
                    with current.working_for(self._drawn_for):
                        item = next(self._inner, _END)
                    self._drawn_for = None
                if item is _END:
                    return items, places, True
                place = self._inner.place
            else:
                item, place, before, batch = self._held
                self._held = None
            own = row_of(place) // size
            if items and own != unit:
                self._held = (item, place, before, batch)
                return items, places, False
            items.append(item)
            places.append(place)
            unit = own


class _UnitBatchIterator(BatchIterator):
    saves: ClassVar[Mapping[str, StateKind]] = Units.saves

    def __init__(self, stage: UnitBatchDataset, lane: Lane) -> None:
        super().__init__(stage.dataset.open(lane), lane, stage.hooks, stage.unit)
        self.stage = stage
        self.units = Units(self.inner, stage.unit_rows, lane)

    def _position(self) -> State:
        return self.units.position()

    def _go_to(self, position: State) -> None:
        self.units.go_to(position)

    def _produce(self) -> Any:
        stage, lane = self.stage, self.lane
        items, places, ended = self.units.next()
        if not items:
            raise StopIteration
        row = row_of(places[-1])
        size = stage.batch_size
        if ended:  # the unit may have fewer rows
            size = min(size, self.inner.row - row // stage.unit_rows * stage.unit_rows)
        missing = size - len(items) if stage.repeats else 0
        # Hooks may change what they get, so no two items are the same object.
        items += [copy(items[number % len(items)]) for number in range(missing)]
        if ended and stage.drop_last and len(items) < stage.batch_size:
            raise StopIteration
        lane.enter(row)
        return self._apply_to_batch(items, row, repeated=missing)


_END = object()
