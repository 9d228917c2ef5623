"""Shuffle a stream through a buffer of bounded length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from energon.errors import ConfigError, StateError
from energon.webdataset.draws import make_draws
from energon.webdataset.replay import NOTE_ITEMS, Replay
from energon.webdataset.stage import Context, Stage, StageIterator, State, unpack


@dataclass(frozen=True)
class Shuffle(Stage):
    """Yields each item once, drawn at random from a buffer.

    Args:
        bufsize: How many items the buffer holds. It fills while items are given out: two are
            read for each one.
        initial: How many are read before the first is given out.
        rng: Generator to draw from, which goes on from epoch to epoch; None means that the order
            is a function of seed, epoch and worker.
        seed: Seed of its own, in place of the pipeline's.

    Raises:
        ConfigError: If a length is negative.
    """

    bufsize: int = 1000
    initial: int = 100
    rng: random.Random | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.bufsize < 0 or self.initial < 0:
            raise ConfigError(
                f"shuffle(bufsize={self.bufsize}, initial={self.initial}): lengths of a buffer "
                "must not be negative"
            )

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if self.bufsize < 1:
            return source
        seeds = () if self.seed is None else (self.seed,)
        return _ShuffleIterator(self, source, lambda block: context.seed_of(*seeds, block))


class _ShuffleIterator(StageIterator):
    def __init__(
        self, stage: Shuffle, source: Iterator[Any], seed_of: Callable[[int], int]
    ) -> None:
        self._stage = stage
        self._replay = Replay(source)
        self._buffer: list[Any] = []
        self._numbers: list[int] = []
        self._draws = make_draws(stage.rng, seed_of)
        self._restored = 0
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        size, buffer, numbers = self._stage.bufsize, self._buffer, self._numbers
        replay, draw = self._replay, self._draws.below
        source = iter(replay)
        taken = self._refill(source)
        wanted = 1 if taken else max(1, min(self._stage.initial, size))
        tidy = taken + NOTE_ITEMS
        # The second item for each one that is given out, until the buffer is full.
        while more := list(islice(source, wanted + (bool(taken) and len(buffer) + 1 < size))):
            buffer += more
            numbers += range(taken, taken + len(more))
            taken += len(more)
            if taken >= tidy:
                replay.oldest = min(numbers)
                tidy = taken + NOTE_ITEMS
            wanted = 1
            yield _remove(buffer, numbers, draw(len(buffer)))
        while buffer:
            yield _remove(buffer, numbers, draw(len(buffer)))

    def state_dict(self) -> State:
        replay = self._replay
        if self._restored:
            # Nothing was taken since the state was loaded: it is the state.
            kept, taken, oldest = self._numbers, self._restored, 0
        else:
            taken = replay.count
            oldest = replay.oldest = min(self._numbers, default=taken)
            kept = [number - oldest for number in self._numbers]
        return {
            "replay": replay.state_dict(),
            "taken": taken - oldest,
            "kept": list(kept),
            **self._draws.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        replay, taken, kept, drawn = unpack(state, "replay", "taken", "kept", "drawn")
        self._replay.load_state_dict(replay)
        self._restored = taken
        self._numbers += kept
        self._draws.load_state_dict({"drawn": drawn})

    def _refill(self, source: Iterator[Any]) -> int:
        """Take the items of a restored buffer again; return how many were taken."""
        taken, self._restored = self._restored, 0
        places = {number: place for place, number in enumerate(self._numbers)}
        self._buffer += [None] * len(places)
        for number, item in enumerate(islice(source, taken)):
            if number in places:
                self._buffer[places.pop(number)] = item
        if places:
            raise StateError(
                f"the data has ended {len(places)} items before the saved position; has it "
                "changed since?"
            )
        return taken


def _remove(buffer: list[Any], numbers: list[int], pick: int) -> Any:
    """Take an item out; the last one fills the gap, so that this costs the same everywhere."""
    numbers[pick] = numbers[-1]
    numbers.pop()
    item = buffer[pick]
    buffer[pick] = buffer[-1]
    buffer.pop()
    return item
