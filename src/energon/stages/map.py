"""Apply user hooks to each item."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from energon.errors import StateError
from energon.samples.restore_key import RestoreKey, flat, key_of
from energon.stages.apply import ApplyIterator, again, apply_again
from energon.stages.base import Dataset, DatasetIterator, Place
from energon.stages.hook import SKIPPED, Hook
from energon.stages.lane import Address, Lane

logger = logging.getLogger("energon")


@dataclass(frozen=True)
class MapDataset(Dataset[Any]):
    """Apply hooks to each item, one after the other; any may skip, fail or yield several.

    Args:
        dataset: The items.
        hooks: Returns the hooks for an item; they are known by identity, so it always returns
            the same ones.
    """

    dataset: Dataset[Any]
    hooks: Callable[[Any], tuple[Hook, ...]]

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _MapIterator(self, lane, self.dataset.open(lane))

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.dataset.num_items(lane, lanes)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        for place in places:
            match place:
                case [_, int(), int() | None]:
                    continue
            raise StateError(
                f"saved state has {place!r:.200} as the place of a sample; it is damaged or was "
                "edited"
            )
        items = self.dataset.read_again(lane, [inner for inner, *_ in places])
        iterator = _MapIterator(self, lane, _NOTHING)
        return [
            item if item is SKIPPED else iterator.output(item, place)
            for item, place in zip(items, places, strict=True)
        ]

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        item, subs = self.dataset.restore(lane, key)
        own = key_of(item) or key
        return apply_again(item, self.hooks(item), lane, address=flat(own), key=own, subs=subs)


_NOTHING: DatasetIterator[Any] = DatasetIterator()
"""For hooks that are run on items which are there already."""


class _MapIterator(ApplyIterator):
    def __init__(self, stage: MapDataset, lane: Lane, inner: DatasetIterator[Any]) -> None:
        super().__init__(inner, lane)
        self.hooks = stage.hooks

    @property
    def place(self) -> Place:
        return [self.inner.place, max(0, self.given - 1), self.batch]

    def output(self, item: Any, place: Place) -> Any:
        """Return the output for `item` that was at `place`, or SKIPPED."""
        inner, sub, batch = place
        self.outputs = None
        with self.lane.present.working_for(batch):
            output = self._run(item, row_of(inner))
            if self.outputs is None or sub == 0:
                return output
            for _ in again(self.outputs, sub - 1):
                pass
            return next(self.outputs, SKIPPED)

    def _produce(self) -> Any:
        row = self.inner.row
        return self._run(next(self.inner), row)

    def _run(self, item: Any, row: int) -> Any:
        lane = self.lane
        address = item_address(item, lane, row)
        lane.enter(row, address)
        if row in lane.skip_rows:
            lane.counts["skipped after killing workers"] += 1
            logger.error(
                "left out row %d of lane %d, sample %s: it killed workers again and again",
                row,
                lane.number,
                address,
            )
            return SKIPPED
        return self._apply(item, self.hooks(item), address, partial(key_of, item))


def item_address(item: Any, lane: Lane, row: int) -> Address:
    """Return what seeds the hooks of an item: its place in the data, or else in the lane."""
    key = key_of(item)
    return ("lane", lane.number, row) if key is None else flat(key)


def batch_of(place: Place) -> int | None:
    """Return the batch of the lane for which user code made the item at `place`, if any did."""
    if isinstance(place, list) and len(place) == 3:
        batch = place[2]
    else:
        batch = place.get("batch") if isinstance(place, dict) else None
    return batch if isinstance(batch, int) else None


def row_of(place: Place) -> int:
    """Return the row that an item came from; -1 if its place does not tell."""
    while isinstance(place, list) and place:
        place = place[0]
    return place if isinstance(place, int) else -1
