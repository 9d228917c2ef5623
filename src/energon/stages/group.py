"""Make batches of items of the same group, collected in one bucket per group.

The position is that of the stream, and the places of the items waiting in buckets.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar

from energon.errors import FatalSampleError, check_at_least, is_whole
from energon.samples.crude import RestoreKey, key_of
from energon.stages.base import Dataset, DatasetIterator, ItemPlace, State, StateKind, unpack
from energon.stages.batch import BatchIterator, restore_batch
from energon.stages.hooks.failures import describe_sources
from energon.stages.hooks.hook import SKIPPED, Hook, HookRunner
from energon.stages.lane import Lane
from energon.stages.map import batch_of, row_of

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
        # Places of all waiting items, in the order of arrival.
        self.places: dict[int, ItemPlace] = {}
        self.arrived = 0
        self.unread: list[ItemPlace] | None = None
        # Items that were drawn but are not yet in a bucket, and a bucket that is already full:
        # only needed where the size of a bucket shrinks.
        self.drawn: deque[tuple[Any, ItemPlace]] = deque()
        self.filled: _Bucket | None = None

    def _position(self) -> State:
        return {"inner": self.inner.state_dict(), "waiting": self._waiting_places()}

    def _go_to(self, position: State) -> None:
        inner, self.unread = unpack(position, self.saves)
        self.inner.load_state_dict(inner)

    def _waiting_places(self) -> list[ItemPlace]:
        if self.unread is not None:
            return self.unread
        return [*self.places.values(), *(place for _, place in self.drawn)]

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

    def _add(self, item: Any, place: ItemPlace) -> _Bucket | None:
        """Put an item into its bucket; return the bucket, or None if the item is skipped."""
        key = key_of(item)
        address = ("lane", self.lane.number, row_of(place) + 1) if key is None else key
        found = self.criterion(item, address)
        if found is SKIPPED:
            return None
        group, size = self._check(found, item)
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
        bucket.items[self.arrived], self.places[self.arrived] = item, place
        self.arrived += 1
        return bucket

    def _check(self, found: Any, item: Any) -> tuple[Hashable, int]:
        if not isinstance(found, tuple) or len(found) != 2:
            raise self._error(item, f"{found!r}; expected a group and a batch size or None")
        group, own = found
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

    def _error(self, item: Any, found: str) -> FatalSampleError:
        hook = self.stage.criterion
        source = describe_sources(hook.locate(item) if hook.locate is not None else ())
        return FatalSampleError(f"{hook.name} returned {found} ({source})")

    def _empty(self, bucket: _Bucket) -> list[Any]:
        # A new bucket is created for the next item of the group, so buckets are ordered by their
        # oldest items, also after a restore.
        del self.buckets[bucket.group]
        for number in bucket.items:
            del self.places[number]
        return list(bucket.items.values())

    def _read_waiting(self, places: list[ItemPlace]) -> None:
        """Refill the buckets.

        Earlier stages have already counted these items. The criterion still counts: an item that
        it skips now was not in a bucket but drawn ahead, so it has not been counted before.
        """
        self.unread = None
        lane = replace(self.lane, counts=Counter())
        items = self.stage.dataset.read_again(lane, places)
        for item, place in zip(items, places, strict=True):
            if item is SKIPPED:
                continue
            if self.filled is not None:
                self.drawn.append((item, place))
                continue
            with self.lane.current.working_for(batch_of(place)):
                bucket = self._add(item, place)
            if bucket is not None and len(bucket.items) == bucket.size:
                self.filled = bucket
