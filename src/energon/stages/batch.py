"""Make batches: of consecutive items, of rows that a blend draws from one dataset, or of groups.

The position of batches of groups is that of the stream, and the states of the items waiting in
buckets, of which each group has one.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import index
from typing import Any, ClassVar

from energon.errors import FatalSampleError, check_at_least, is_whole
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
    ItemState,
    State,
    StateKind,
    unpack,
)
from energon.stages.hooks.failures import describe_sources
from energon.stages.hooks.hook import SKIPPED, ApplyIterator, Hook, HookRunner, reapply, runners_of
from energon.stages.lane import Lane, SeedKey
from energon.stages.map import batch_of, row_of


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
        seed_key = batch_seed_key(first, lane, row)
        key = partial(_batch_key, items, keys, first, lane.batch_number(seed_key))
        batch = self._apply(items, runners, seed_key, key)
        if batch is not SKIPPED:
            lane.counts[self.unit] += count - repeated
            if repeated:
                lane.counts["repeated"] += repeated
        elif self.unit == "packs":
            # Their samples were counted when they were packed.
            samples = chain.from_iterable(sample_keys(key_of(pack) or ()) for pack in items)
            lane.counts["samples"] -= sum(1 for _ in samples)
        return with_key(batch, key, count)


def _batch_key(items: Any, keys: Any, first: RestoreKey | None, number: int) -> RestoreKey | None:
    """Return the key of a batch of `items`, whose keys are known if they are collated already."""
    keys = (first, *map(key_of, items[1:])) if keys is None else tuple(keys)
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


def batch_seed_key(first: RestoreKey | None, lane: Lane, row: int) -> SeedKey:
    """Return the seed key of the hooks of a batch.

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
        seed_key = batch_seed_key(key_of(items[0]), lane, 0)
        batch, left = reapply(
            items, hooks, lane, seed_key=seed_key, key=own, subs=subs, yields_batches=True
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
        # with its state, and the position and the batch for which it was drawn.
        self._held: tuple[Any, ItemState, State, int | None] | None = None
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

    def next(self) -> tuple[list[Any], list[ItemState], bool]:
        """Return the items of the next unit that is not empty, their states, and if it is last."""
        size, current = self._rows, self._current
        items: list[Any] = []
        item_states: list[ItemState] = []
        unit = -1
        while True:
            if self._held is None:
                if items and self._inner.row >= (unit + 1) * size:
                    return items, item_states, False
                before, batch = self._inner.state_dict(), current.batch
                if self._drawn_for is None:
                    item = next(self._inner, _END)
                else:
                    with current.working_for(self._drawn_for):
                        item = next(self._inner, _END)
                    self._drawn_for = None
                if item is _END:
                    return items, item_states, True
                item_state = self._inner.item_state
            else:
                item, item_state, before, batch = self._held
                self._held = None
            own = row_of(item_state) // size
            if items and own != unit:
                self._held = (item, item_state, before, batch)
                return items, item_states, False
            items.append(item)
            item_states.append(item_state)
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
        items, item_states, ended = self.units.next()
        if not items:
            raise StopIteration
        row = row_of(item_states[-1])
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


MAX_COMPARED_GROUPS = 64
"""With more groups than this, items are drawn one by one: the fullest bucket needs few anyway."""


@dataclass(frozen=True)
class GroupDataset(Dataset[Any]):
    """Make batches of items that `criterion` assigns to the same group.

    Args:
        dataset: The items.
        criterion: Takes an item and returns its group (anything hashable) and the batch size of
            that group, or None for `batch_size`.
        batch_size: Batch size if the criterion returns none.
        hooks: Turn a list of items into a batch.
        drop_last: Whether to drop the items still waiting at the end of the data, instead of
            returning them in smaller batches.
        unit: Name of the items in statistics.
    """

    dataset: Dataset[Any]
    criterion: Hook
    batch_size: int | None
    hooks: tuple[Hook, ...] = ()
    drop_last: bool = False
    unit: str = "samples"

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_at_least(1, "batch_size", self.batch_size)

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _GroupIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return restore_batch(self.dataset, self.hooks, lane, key)


class _Bucket:
    """The waiting items of one group, by order of arrival."""

    def __init__(self, group: Hashable, size: int) -> None:
        self.group = group
        self.size = size
        self.items: dict[int, Any] = {}


class _GroupIterator(BatchIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"inner": dict, "waiting": list}

    def __init__(self, stage: GroupDataset, lane: Lane) -> None:
        super().__init__(stage.dataset.open(lane), lane, stage.hooks, stage.unit)
        self.stage = stage
        self.criterion = HookRunner(stage.criterion, lane)
        self.buckets: dict[Hashable, _Bucket] = {}
        # States of all waiting items, in the order of arrival.
        self.item_states: dict[int, ItemState] = {}
        self.arrived = 0
        self.unread: list[ItemState] | None = None
        # Items that were drawn but are not yet in a bucket, and a bucket that is already full:
        # only needed where the size of a bucket shrinks.
        self.drawn: deque[tuple[Any, ItemState]] = deque()
        self.filled: _Bucket | None = None

    def _position(self) -> State:
        return {"inner": self.inner.state_dict(), "waiting": self._waiting_states()}

    def _go_to(self, position: State) -> None:
        inner, self.unread = unpack(position, self.saves)
        self.inner.load_state_dict(inner)

    def _waiting_states(self) -> list[ItemState]:
        if self.unread is not None:
            return self.unread
        return [*self.item_states.values(), *(item_state for _, item_state in self.drawn)]

    def _produce(self) -> Any:
        if self.unread is not None:
            self._read_waiting(self.unread)
        row = self.inner.row
        items = self._next_full()
        self.lane.enter(row, several=True)
        return self._apply_to_batch(items, row)

    def _next_full(self) -> list[Any]:
        """Return the items of the next full bucket, or of any bucket at the end of the data."""
        bucket, self.filled = self.filled, None
        while bucket is None or len(bucket.items) < bucket.size:
            if not self.drawn:
                self.drawn.extend(zip(*self.inner.take(self._missing()), strict=True))
            if not self.drawn:
                if self.stage.drop_last or not self.buckets:
                    raise StopIteration
                return self._empty(next(iter(self.buckets.values())))
            bucket = self._add(*self.drawn.popleft())
        return self._empty(bucket)

    def _missing(self) -> int:
        """Return the smallest number of items that can fill a bucket."""
        if self.stage.batch_size is None or len(self.buckets) > MAX_COMPARED_GROUPS:
            return 1
        missing = [bucket.size - len(bucket.items) for bucket in self.buckets.values()]
        return min(self.stage.batch_size, *missing) if missing else self.stage.batch_size

    def _add(self, item: Any, item_state: ItemState) -> _Bucket | None:
        """Put an item into its bucket; return the bucket, or None if the item is skipped."""
        key = key_of(item)
        seed_key = ("lane", self.lane.number, row_of(item_state) + 1) if key is None else key
        answer = self.criterion(item, seed_key)
        if answer is SKIPPED:
            return None
        group, size = self._check(answer, item)
        bucket = self.buckets.get(group)
        if bucket is None:
            torch: Any = sys.modules.get("torch")
            if torch is not None and isinstance(group, torch.Tensor):
                # Its hash is that of the object, so no two samples would share a group.
                raise self._error(item, f"a tensor as the group; use {group.tolist()!r}, its value")
            bucket = self.buckets[group] = _Bucket(group, size)
        elif bucket.size != size:
            raise self._error(
                item,
                f"batch size {size} for group {group!r}, and {bucket.size} for an earlier sample "
                "of it; all samples of a group need the same",
            )
        bucket.items[self.arrived], self.item_states[self.arrived] = item, item_state
        self.arrived += 1
        return bucket

    def _check(self, answer: Any, item: Any) -> tuple[Hashable, int]:
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._error(item, f"{answer!r}; expected a group and a batch size or None")
        group, own = answer
        try:
            hash(group)
        except TypeError as error:
            raise self._error(item, f"the group {group!r}, which is not hashable") from error
        size: Any = self.stage.batch_size if own is None else own
        if not is_whole(size) or size < 1:
            raise self._error(
                item,
                f"batch size {size!r} for group {group!r}; give a whole number from 1 here, or a "
                "batch_size for all groups",
            )
        return group, index(size)

    def _error(self, item: Any, answer: str) -> FatalSampleError:
        hook = self.stage.criterion
        source = describe_sources(hook.locate(item) if hook.locate is not None else ())
        return FatalSampleError(f"{hook.name} returned {answer} ({source})")

    def _empty(self, bucket: _Bucket) -> list[Any]:
        # A new bucket is created for the next item of the group, so buckets are ordered by their
        # oldest items, also after a restore.
        del self.buckets[bucket.group]
        for number in bucket.items:
            del self.item_states[number]
        return list(bucket.items.values())

    def _read_waiting(self, item_states: list[ItemState]) -> None:
        """Refill the buckets.

        Earlier stages have already counted these items. The criterion still counts: an item that
        it skips now was not in a bucket but drawn ahead, so it has not been counted before.
        """
        self.unread = None
        lane = replace(self.lane, counts=Counter())
        items = self.stage.dataset.read_again(lane, item_states)
        for item, item_state in zip(items, item_states, strict=True):
            if item is SKIPPED:
                continue
            if self.filled is not None:
                self.drawn.append((item, item_state))
                continue
            with self.lane.current.working_for(batch_of(item_state)):
                bucket = self._add(item, item_state)
            if bucket is not None and len(bucket.items) == bucket.size:
                self.filled = bucket
