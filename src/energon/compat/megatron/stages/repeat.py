"""Read finite data again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from energon.errors import ConfigError
from energon.samples.crude import RestoreKey
from energon.stages.base import Dataset, DatasetIterator, Kind, Place, State, check_places, unpack
from energon.stages.hook import SKIPPED
from energon.stages.lane import Lane, Reading


@dataclass(frozen=True)
class Repeat(Dataset[Any]):
    """Yield the items of `dataset` several times; leaves are shuffled again for each pass.

    Args:
        dataset: The items.
        repeats: How many passes. The last one of a fractional number ends after that fraction
            of the items of the lane; None never ends.
    """

    dataset: Dataset[Any]
    repeats: float | None = None

    def __post_init__(self) -> None:
        if self.repeats is not None and not 0 < self.repeats < float("inf"):
            raise ConfigError(f"repeats must be above 0, or None for no end, got {self.repeats}")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _RepeatIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None or self.repeats is None else int(items * self.repeats)

    def read_again(self, lane: Lane, places: Sequence[Place]) -> list[Any]:
        check_places(places, number_at=0)
        items: list[Any] = [None] * len(places)
        for number in dict.fromkeys(number for number, _ in places):
            wanted = [index for index, place in enumerate(places) if place[0] == number]
            inner = self.lane_of_pass(lane, number)
            found = self.dataset.read_again(inner, [places[index][1] for index in wanted])
            for index, item in zip(wanted, found, strict=True):
                items[index] = item
        return items

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)

    def lane_of_pass(self, lane: Lane, number: int) -> Lane:
        """Return what a pass is read in."""
        before = 0 if self.repeats is None else lane.pass_number * -int(-self.repeats // 1)
        return replace(lane, pass_number=before + number, reading=Reading())


class _RepeatIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, Kind]] = {"pass": int, "given": int, "inner": dict}

    def __init__(self, stage: Repeat, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        # A lane may have nothing of data with fewer samples than lanes in most passes.
        self.passes_in_vain = 0
        self._begin(0, 0)

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def address(self) -> tuple[int, ...]:
        return (self.number, *self.inner.address)

    @property
    def place(self) -> Place:
        return [self.number, self.inner.place]

    def __next__(self) -> Any:
        while self.passes_in_vain <= self.lane.lanes:
            if self.given < self._due():
                item = next(self.inner, SKIPPED)
                if item is not SKIPPED:
                    self.given += 1
                    self.passes_in_vain = 0
                    return item
            repeats = self.stage.repeats
            if repeats is not None and self.number + 1 >= repeats:
                break
            self.passes_in_vain += not self.given
            self._begin(self.number + 1, 0)
        raise StopIteration

    def _due(self) -> float:
        """Return how many items the present pass may give."""
        repeats, lane = self.stage.repeats, self.lane
        if repeats is None or self.number + 1 <= repeats:
            return float("inf")
        items = self.stage.dataset.num_items(lane.number, lane.lanes)
        return float("inf") if items is None else int(items * (repeats - self.number))

    def _begin(self, number: int, given: int) -> None:
        self.number, self.given = number, given
        self.inner = self.stage.dataset.open(self.stage.lane_of_pass(self.lane, number))

    def state_dict(self) -> State:
        return {"pass": self.number, "given": self.given, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: State) -> None:
        number, given, inner = unpack(state, self.saves)
        self._begin(number, given)
        self.inner.load_state_dict(inner)
