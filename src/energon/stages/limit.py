"""Stop after a number of items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError
from energon.samples.restore_key import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Place, State, unpack
from energon.stages.lane import Lane


@dataclass(frozen=True)
class Limit(Dataset[Any]):
    """Yield the first items of `dataset`: `length` over all lanes, dealt evenly to them."""

    dataset: Dataset[Any]
    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ConfigError(f"a limit is 0 or more items, not {self.length}")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _LimitIterator(self, lane)

    def share(self, lane: int, lanes: int) -> int:
        """Return how many items lane `lane` of `lanes` may yield."""
        return max(0, -(-(self.length - lane) // lanes))

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        share = self.share(lane, lanes)
        return share if items is None else min(items, share)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        return self.dataset.read_again(lane, places)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)


class _LimitIterator(DatasetIterator[Any]):
    def __init__(self, stage: Limit, lane: Lane) -> None:
        self.inner = stage.dataset.open(lane)
        self.share = stage.share(lane.number, lane.lanes)
        self.given = 0

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def address(self) -> tuple[int, ...]:
        return self.inner.address

    @property
    def place(self) -> Place:
        return self.inner.place

    def __next__(self) -> Any:
        if self.given >= self.share:
            raise StopIteration
        item = next(self.inner)
        self.given += 1
        return item

    def state_dict(self) -> State:
        return {"given": self.given, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.given, inner = unpack(state, "given", "inner")
        self.inner.load_state_dict(inner)
