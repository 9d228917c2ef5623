"""Stages over whole streams: apply a function to one, shuffle one through a buffer.

States contain addresses only. Whatever a user function remembers is on its call stack, so the
position of `IterMap` is where the function started, and how many outputs it has yielded since:
resuming runs it again from there. A function whose outputs depend only on the last input that it
took starts over with every input.

Pipelines made by the dataset getters need no shuffle buffer: there `shuffle_buffer_size`
permutes numbers before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from energon.stages.hooks.apply import replay
from energon.stages.hooks.hook import SKIPPED
from energon.stages.lane import Lane


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
                "does not say which"
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
