"""Stages over streams: blend, concatenate, repeat, shuffle through a buffer, apply a function.

States contain addresses only. Whatever a user function remembers is on its call stack, so the
position of `IterMap` is where the function started, and how many outputs it has yielded since:
resuming runs it again from there. A function whose outputs depend only on the last input that it
took starts over with every input.

Pipelines made by the dataset getters need no shuffle buffer: there `shuffle_buffer_size`
permutes numbers before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from energon.errors import ConfigError, StateError
from energon.plan.randomness import derive_seed
from energon.samples.crude import RestoreKey
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
from energon.stages.blocks import LaneReading
from energon.stages.hooks.hook import SKIPPED, replay
from energon.stages.lane import Lane


@dataclass(frozen=True)
class Branches(Dataset[Any]):
    """A stage each item of which comes from one of `datasets`."""

    datasets: tuple[Dataset[Any], ...]

    def num_items(self, lane: int, lanes: int) -> int | None:
        return total_items(self.datasets, lane, lanes)

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        check_places(places, number_at=0, stop=len(self.datasets))
        items: list[Any] = [None] * len(places)
        for number, dataset in enumerate(self.datasets):
            own = [index for index, (branch, _) in enumerate(places) if branch == number]
            samples = dataset.read_again(
                lane.branch(number, len(self.datasets)), [places[index][1] for index in own]
            )
            for index, item in zip(own, samples, strict=True):
                items[index] = item
        return items

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        # Keys name the leaf, so at most one dataset has it.
        reasons = []
        for number, dataset in enumerate(self.datasets):
            try:
                return dataset.restore(lane.branch(number, len(self.datasets)), key)
            except StateError as error:
                reasons.append(str(error))
        raise StateError(f"no dataset has {key}: {'; '.join(dict.fromkeys(reasons))}")


def check_places(places: Sequence[ItemPlace], *, number_at: int, stop: int | None = None) -> None:
    """Raise StateError unless places are pairs of a number and a place of the stage below.

    Args:
        places: Of items that a saved state names.
        number_at: Where in each pair the number is.
        stop: What the number is below; None for anything.
    """
    for place in places:
        if isinstance(place, list | tuple) and len(place) == 2:
            number = place[number_at]
            if isinstance(number, int) and number >= 0 and (stop is None or number < stop):
                continue
        raise StateError(
            f"saved state has the place {place!r:.100}, which no stage writes; it is damaged or "
            "was edited"
        )


def open_branches(datasets: Sequence[Dataset[Any]], lane: Lane) -> list[DatasetIterator[Any]]:
    """Open each of `datasets` in a branch of `lane`."""
    count = len(datasets)
    return [dataset.open(lane.branch(number, count)) for number, dataset in enumerate(datasets)]


def total_items(datasets: Iterable[Dataset[Any]], lane: int, lanes: int) -> int | None:
    """Return the number of items of all `datasets` in a lane; None if one is endless."""
    total = 0
    for dataset in datasets:
        items = dataset.num_items(lane, lanes)
        if items is None:
            return None
        total += items
    return total


@dataclass(frozen=True)
class ConcatStage(Branches):
    """Yield the items of `datasets`, one dataset after another."""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ConfigError("a concatenation needs at least one dataset, got none")

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ConcatIterator(self, lane)


class _ConcatIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"present": int, "inner": dict}

    def __init__(self, stage: ConcatStage, lane: Lane) -> None:
        self.branches = open_branches(stage.datasets, lane)
        self.present = 0

    @property
    def row(self) -> int:
        return self.branches[self.present].row * len(self.branches) + self.present

    @property
    def address(self) -> tuple[int, ...]:
        return (self.present, *self.branches[self.present].address)

    @property
    def place(self) -> ItemPlace:
        return [self.present, self.branches[self.present].place]

    def __next__(self) -> Any:
        while True:
            try:
                return next(self.branches[self.present])
            except StopIteration:
                if self.present + 1 == len(self.branches):
                    raise
                self.present += 1

    def state_dict(self) -> State:
        return {"present": self.present, "inner": self.branches[self.present].state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.present, inner = unpack(state, self.saves)
        if self.present >= len(self.branches):
            raise StateError(
                f"saved state is in dataset {self.present}, there are {len(self.branches)}; was it "
                "saved by another pipeline?"
            )
        self.branches[self.present].load_state_dict(inner)


@dataclass(frozen=True)
class BlendStage(Branches):
    """Draw items from `datasets` by `weights`, until all have ended.

    When a dataset has ended, the others share its draws. A weight of 0 draws nothing.
    """

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.datasets or len(self.datasets) != len(self.weights):
            raise ConfigError(
                f"a blend needs a weight for each dataset: {len(self.datasets)} datasets, "
                f"{len(self.weights)} weights"
            )
        if not all(0 <= weight < float("inf") for weight in self.weights) or not any(self.weights):
            raise ConfigError(
                f"weights are numbers of at least 0, and not all 0: {list(self.weights)}"
            )

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _BlendIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        drawn = (each for each, weight in zip(self.datasets, self.weights, strict=True) if weight)
        return total_items(drawn, lane, lanes)


class _BlendIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {
        "counts": list,
        "ended": list,
        "drawn": int,
        "inner": list,
    }

    def __init__(self, stage: BlendStage, lane: Lane) -> None:
        self.branches = open_branches(stage.datasets, lane)
        self.weights = [float(weight) for weight in stage.weights]
        # How far each dataset is ahead of its share at the beginning.
        self.phases = [
            derive_seed(lane.seed, "blend", lane.number, branch) / 2**64
            for branch in range(len(self.branches))
        ]
        # Draws since the last change of shares.
        self.counts = [0] * len(self.branches)
        self.ended: list[int] = []
        self.drawn = 0
        self.last = 0

    @property
    def row(self) -> int:
        chosen = self._choose()
        return (
            self.branches[chosen].row * len(self.branches) + chosen if chosen >= 0 else self.drawn
        )

    @property
    def address(self) -> tuple[int, ...]:
        return (self.drawn,)

    @property
    def place(self) -> ItemPlace:
        return [self.last, self.branches[self.last].place]

    def __next__(self) -> Any:
        while (chosen := self._choose()) >= 0:
            try:
                item = next(self.branches[chosen])
            except StopIteration:
                self.ended.append(chosen)
                self.counts = [0] * len(self.branches)
                continue
            self.counts[chosen] += 1
            self.drawn += 1
            self.last = chosen
            return item
        raise StopIteration

    def _choose(self) -> int:
        """Return the dataset that is furthest behind its share; -1 if all have ended."""
        alive = [
            (weight if number not in self.ended else 0.0)
            for number, weight in enumerate(self.weights)
        ]
        total = sum(alive)
        if not total:
            return -1
        turns = sum(self.counts) + 1
        behind = [
            turns * weight / total + phase - count if weight else float("-inf")
            for weight, phase, count in zip(alive, self.phases, self.counts, strict=True)
        ]
        return behind.index(max(behind))

    def state_dict(self) -> State:
        return {
            "counts": list(self.counts),
            "ended": list(self.ended),
            "drawn": self.drawn,
            "inner": [branch.state_dict() for branch in self.branches],
        }

    def load_state_dict(self, state: State) -> None:
        counts, ended, self.drawn, inner = unpack(state, self.saves)
        self.counts, self.ended = list(counts), list(ended)
        if {len(counts), len(inner)} != {len(self.branches)}:
            raise StateError(
                f"saved state is of a blend of {len(counts)} datasets, this one has "
                f"{len(self.branches)}; was it saved by another pipeline?"
            )
        for branch, saved in zip(self.branches, inner, strict=True):
            branch.load_state_dict(saved)


@dataclass(frozen=True)
class Repeat(Dataset[Any]):
    """Yield the items of `dataset` several times; leaves are shuffled again for each pass.

    Args:
        dataset: The items.
        repeats: Number of passes; with a fraction, the last one ends after that fraction of the
            lane's items. None for no limit.
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

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        check_places(places, number_at=0)
        items: list[Any] = [None] * len(places)
        for number in dict.fromkeys(number for number, _ in places):
            own = [index for index, place in enumerate(places) if place[0] == number]
            inner = self.lane_of_pass(lane, number)
            samples = self.dataset.read_again(inner, [places[index][1] for index in own])
            for index, item in zip(own, samples, strict=True):
                items[index] = item
        return items

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        return self.dataset.restore(lane, key)

    def lane_of_pass(self, lane: Lane, number: int) -> Lane:
        """Return the lane in which a pass is read."""
        before = 0 if self.repeats is None else lane.pass_number * -int(-self.repeats // 1)
        return replace(lane, pass_number=before + number, reading=LaneReading())


class _RepeatIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"pass": int, "given": int, "inner": dict}

    def __init__(self, stage: Repeat, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        # With fewer samples than lanes, a lane has no samples in most passes.
        self.passes_in_vain = 0
        self._begin(0, 0)

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def address(self) -> tuple[int, ...]:
        return (self.number, *self.inner.address)

    @property
    def place(self) -> ItemPlace:
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
        """Return how many items the current pass may yield."""
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


@dataclass(frozen=True)
class IterMap(Dataset[Any]):
    """Yield the output of a function of the iterator over all items.

    Args:
        dataset: The items.
        function: Takes an iterator of items, and returns an iterator. Its errors end the run.
        num_outputs: Returns the number of outputs for a number of items.
        remembers: Whether an output may depend on more than the last item that was taken.
    """

    dataset: Dataset[Any]
    function: Callable[[Iterator[Any]], Iterable[Any]]
    num_outputs: Callable[[int], int]
    remembers: bool = True

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _IterMapIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        items = self.dataset.num_items(lane, lanes)
        return None if items is None else self.num_outputs(items)

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        if self.remembers:
            raise ConfigError(
                f"what {self.function} yields may depend on all previous samples, so single "
                "samples cannot be recreated; if each output depends only on the last input, pass "
                "stateless_iter_fn=True"
            )
        item, rest = self.dataset.restore(lane, key)
        outputs = list(self.function(iter([item])))
        if len(outputs) != 1:
            raise StateError(
                f"{self.function} yields {len(outputs)} outputs for the sample {key}, whose key "
                "selects none"
            )
        return outputs[0], rest


class _IterMapIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"start": dict, "given": int}

    def __init__(self, stage: IterMap, lane: Lane) -> None:
        self.stage = stage
        self.inner = stage.dataset.open(lane)
        self.outputs: Iterator[Any] | None = None
        self.start = self.inner.state_dict()
        self.given = 0
        self.last: State | None = None

    @property
    def row(self) -> int:
        return self.inner.row

    @property
    def address(self) -> tuple[int, ...]:
        return (*self.inner.address, self.given)

    @property
    def place(self) -> ItemPlace:
        return self.last

    def __next__(self) -> Any:
        if self.outputs is None:
            self.outputs = iter(self.stage.function(self._inputs()))
            # Called only now: a restore may have moved the stream before.
            given, self.given = self.given, 0
            for _ in replay(self.outputs, given):
                self.given += 1
        self.last = self.state_dict()
        output = next(self.outputs)
        self.given += 1
        return output

    def _inputs(self) -> Iterator[Any]:
        while True:
            if not self.stage.remembers:
                self.start, self.given = self.inner.state_dict(), 0
            item = next(self.inner, SKIPPED)
            if item is SKIPPED:
                return
            yield item

    def state_dict(self) -> State:
        return {"start": self.start, "given": self.given}

    def load_state_dict(self, state: State) -> None:
        self.start, self.given = unpack(state, self.saves)
        self.inner.load_state_dict(self.start)


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
        # Swapped with the last one, so that the cost of removal does not depend on the position.
        items[chosen], items[-1] = items[-1], items[chosen]
        places[chosen], places[-1] = places[-1], places[chosen]
        self.last = places.pop()
        return items.pop()

    def _buffer(self) -> list[Any]:
        """Return the waiting items; after a restore, they are read again."""
        if self.items is None:
            samples = self.stage.dataset.read_again(self.lane, self.places)
            kept = [index for index, item in enumerate(samples) if item is not SKIPPED]
            self.items = [samples[index] for index in kept]
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
