"""Read a leaf once: one pass of an endless plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from energon.plan.rows import Plan
from energon.samples.crude import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, ItemPlace, ThroughIterator
from energon.stages.lane import Lane
from energon.stages.read import ReadDataset, Reader


@dataclass(frozen=True)
class ReadPass(Dataset[Any]):
    """Yield every sample of a leaf once, over all lanes together.

    Which pass it is says the lane; every one has an order of its own.

    Args:
        plan: Returns the endless plan of the leaf for a number of lanes: row k of lane v is
            draw k·V + v.
        reader: Reads samples.
        num_samples: How many samples the leaf has.
        leaf: Its number in the reader; None if that knows no other.
    """

    plan: Callable[[int], Plan]
    reader: Reader
    num_samples: int
    leaf: int | None = None

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _PassIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return -(-self.num_samples // lanes)

    def first_row(self, number: int, lane: int, lanes: int) -> int:
        """Return the row with which a pass begins in a lane."""
        return -(-(number * self.num_samples - lane) // lanes)

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        return self._endless.read_again(lane, places)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self._endless.restore(lane, key)

    @property
    def _endless(self) -> ReadDataset:
        return ReadDataset(self.plan, self.reader, self.leaf)


class _PassIterator(ThroughIterator):
    def __init__(self, stage: ReadPass, lane: Lane) -> None:
        number = lane.pass_number
        self.inner = stage._endless.open(
            lane, {"row": stage.first_row(number, lane.number, lane.lanes)}
        )
        self.stop = stage.first_row(number + 1, lane.number, lane.lanes)

    def __next__(self) -> Any:
        if self.inner.row >= self.stop:
            raise StopIteration
        return next(self.inner)

    def take(self, count: int) -> list[Any]:
        return self.inner.take(min(count, self.stop - self.inner.row))
