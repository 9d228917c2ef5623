"""Shuffle any stream through a buffer, whose state holds addresses only.

Pipelines made by the dataset getters need none: there `shuffle_buffer_size` permutes numbers
before anything is read. This is for pipelines that users put together themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from energon.errors import ConfigError
from energon.plan.seeds import derive_seed
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemPlace,
    State,
    StateKind,
    ThroughDataset,
    ThroughIterator,
    unpack,
)
from energon.stages.hook import SKIPPED
from energon.stages.lane import Lane


@dataclass(frozen=True)
class ShuffleBuffer(ThroughDataset):
    """Yield each item of `dataset` once, drawn at random from the next `size` items."""

    dataset: Dataset[Any]
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"the size of a shuffle buffer must be at least 1, got {self.size}")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ShuffleBufferIterator(self, lane)


class _ShuffleBufferIterator(ThroughIterator):
    saves: ClassVar[Mapping[str, StateKind]] = {"drawn": int, "waiting": list, "inner": dict}

    def __init__(self, stage: ShuffleBuffer, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.inner = stage.dataset.open(lane)
        self.items: list[Any] | None = []
        self.places: list[ItemPlace] = []
        self.drawn = 0
        self.last: ItemPlace = None

    @property
    def address(self) -> tuple[int, ...]:
        return (self.drawn,)

    @property
    def place(self) -> ItemPlace:
        return self.last

    def __next__(self) -> Any:
        items, places = self._buffer(), self.places
        while len(items) < self.stage.size:
            item = next(self.inner, SKIPPED)
            if item is SKIPPED:
                break
            items.append(item)
            places.append(self.inner.place)
        if not items:
            raise StopIteration
        lane = self.lane
        address = (lane.pass_number, lane.number, self.drawn)
        chosen = derive_seed(lane.seed, "shuffle buffer", *address) % len(items)
        self.drawn += 1
        # Swapped with the last one, so that removing costs the same wherever it is.
        items[chosen], items[-1] = items[-1], items[chosen]
        places[chosen], places[-1] = places[-1], places[chosen]
        self.last = places.pop()
        return items.pop()

    def _buffer(self) -> list[Any]:
        """Return the items that wait; after a restore they are read again."""
        if self.items is None:
            found = self.stage.dataset.read_again(self.lane, self.places)
            kept = [index for index, item in enumerate(found) if item is not SKIPPED]
            self.items = [found[index] for index in kept]
            self.places = [self.places[index] for index in kept]
        return self.items

    def state_dict(self) -> State:
        return {
            "drawn": self.drawn,
            "waiting": list(self.places),
            "inner": self.inner.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self.drawn, places, inner = unpack(state, self.saves)
        self.inner.load_state_dict(inner)
        self.places, self.items = list(places), None
