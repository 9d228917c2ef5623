"""Stop after a number of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from energon.errors import ConfigError
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    State,
    StateKind,
    ThroughDataset,
    ThroughIterator,
    unpack,
)
from energon.stages.lane import Lane


@dataclass(frozen=True)
class LimitStage(ThroughDataset):
    """Yield the first items of `dataset`: `length` over all lanes, dealt evenly to them."""

    dataset: Dataset[Any]
    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ConfigError(f"limit must be 0 or more, got {self.length}")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _LimitIterator(self, lane)

    def share(self, lane: int, lanes: int) -> int:
        """Return how many items lane `lane` of `lanes` may yield."""
        return max(0, -(-(self.length - lane) // lanes))

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        share = self.share(lane, lanes)
        return share if items is None else min(items, share)


class _LimitIterator(ThroughIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"given": int, "inner": dict}

    def __init__(self, stage: LimitStage, lane: Lane) -> None:
        self.inner = stage.dataset.open(lane)
        self.share = stage.share(lane.number, lane.lanes)
        self.given = 0

    @property
    def address(self) -> tuple[int, ...]:
        return self.inner.address

    def __next__(self) -> Any:
        if self.given >= self.share:
            raise StopIteration
        item = next(self.inner)
        self.given += 1
        return item

    def state_dict(self) -> State:
        return {"given": self.given, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.given, inner = unpack(state, self.saves)
        self.inner.load_state_dict(inner)
