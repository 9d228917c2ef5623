"""Shuffle a stream through a buffer of bounded length.

Random numbers of stages are a function of a seed and a count, so states contain no generator.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any

from energon.errors import ConfigError, StateError
from energon.webdataset.running.worker_info import current_worker_info
from energon.webdataset.stages.base import (
    ALL_SPLITS,
    NOTE_ITEMS,
    Context,
    ReplayLog,
    Stage,
    StageIterator,
    State,
    check_reached,
    unpack,
)


def default_seed(seed: int | str | None = None) -> int:
    """Return a seed as a number: `seed`, or WDS_SEED in the environment, or 0.

    Raises:
        ConfigError: If it is not a whole number.
    """
    name, value = ("WDS_SEED", os.environ.get("WDS_SEED", "0")) if seed is None else ("seed", seed)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={value!r}: expected a whole number") from error


BLOCK_DRAWS = 4096
"""Numbers drawn from one generator: small enough that any number is found quickly."""


class Draws:
    """Random numbers that are a function of a seed and of how many were drawn before.

    Args:
        seed_of: Returns the seed of a block of numbers.
    """

    def __init__(self, seed_of: Callable[[int], int]) -> None:
        self._seed_of = seed_of
        self._blocks = 0
        self._block: Iterator[float] = iter(())

    def block(self) -> Iterator[float]:
        """Return an iterator over numbers from 0 to 1; those taken from it count as drawn."""
        if not length_hint(self._block):
            draw = random.Random(self._seed_of(self._blocks)).random
            self._blocks += 1
            self._block = iter([draw() for _ in range(BLOCK_DRAWS)])
        return self._block

    def fraction(self) -> float:
        """Return a number from 0 up to, but not including, 1."""
        return next(self.block())

    def below(self, limit: int) -> int:
        """Return a whole number from 0 up to, but not including, `limit`."""
        return int(self.fraction() * limit)

    def state_dict(self) -> State:
        """Return how many numbers were drawn."""
        return {"drawn": self._blocks * BLOCK_DRAWS - length_hint(self._block)}

    def load_state_dict(self, state: State) -> None:
        """Continue after this many numbers."""
        self._blocks, taken = divmod(state["drawn"], BLOCK_DRAWS)
        for _ in range(taken):
            self.fraction()


class UserDraws(Draws):
    """Random numbers of a user's generator, whose state is saved."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def block(self) -> Iterator[float]:
        """Return an iterator over numbers from 0 to 1, each drawn when it is taken."""
        return iter(self._rng.random, None)

    def state_dict(self) -> State:
        """Return the state of the generator."""
        if not isinstance(self._rng, random.Random):
            raise StateError(
                f"the pipeline cannot be saved, because shuffle draws from {self._rng!r}; pass "
                "seed instead of rng, or a random.Random"
            )
        return {"drawn": generator_state(self._rng)}

    def load_state_dict(self, state: State) -> None:
        """Set the generator to a saved state."""
        set_generator(self._rng, state["drawn"])


def generator_state(rng: random.Random) -> list[Any]:
    """Return the state of a generator as plain data."""
    version, numbers, gauss = rng.getstate()
    return [version, list(numbers), gauss]


def set_generator(rng: random.Random, state: list[Any]) -> None:
    """Set a generator to a saved state."""
    version, numbers, gauss = state
    rng.setstate((version, tuple(numbers), gauss))


@dataclass(frozen=True)
class Shuffle(Stage):
    """Yields each item once, drawn at random from a buffer.

    Args:
        bufsize: Capacity of the buffer. It fills while items are yielded: two are read for each
            one.
        initial: Number of items read before the first is yielded.
        rng: Generator to draw from, which continues from epoch to epoch; None makes the order a
            function of seed, epoch and worker.
        seed: Replaces the seed of the pipeline.

    Raises:
        ConfigError: If a length is negative.
    """

    bufsize: int = 1000
    initial: int = 100
    rng: random.Random | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        # False, for no buffer, is common in programs for webdataset.
        if any(length is True or length < 0 for length in (self.bufsize, self.initial)):
            raise ConfigError(
                f"shuffle(bufsize={self.bufsize}, initial={self.initial}): lengths of a buffer "
                "are numbers of items, 0 or more"
            )

    @property
    def is_random(self) -> bool:
        return self.bufsize > 0

    @property
    def generators(self) -> Sequence[random.Random]:
        return (self.rng,) if isinstance(self.rng, random.Random) else ()

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if self.bufsize < 1:
            return source
        seeds = () if self.seed is None else (self.seed,)
        return _ShuffleIterator(self, source, lambda block: context.seed_of(*seeds, block))


class detshuffle(Stage):
    """Shuffles items through a buffer, like `shuffle`, whose order is also a function of the seed.

    Args:
        bufsize: See `Shuffle`.
        initial: See `Shuffle`.
        seed: A seed in addition to that of the pipeline.
        epoch: Number of runs so far, from -1. Pipelines count their epochs themselves; outside of
            one, the order is a function of this number.

    Example:
        >>> list(detshuffle(10, seed=1)(range(5))) == list(detshuffle(10, seed=1)(range(5)))
        True
    """

    is_random = True

    def __init__(
        self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1
    ) -> None:
        self.bufsize = bufsize
        self.initial = initial
        self.seed = seed
        self.epoch = epoch

    def __call__(self, source: Iterable[Any] = ()) -> Iterator[Any]:
        context = Context(current_worker_info(), epoch=self.epoch + 1, later_splits=ALL_SPLITS)
        return self.open(iter(source), context)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        self.epoch += 1
        return Shuffle(self.bufsize, self.initial, None, self.seed).open(source, context)

    def describe(self) -> dict[str, Any]:
        settings = {"bufsize": self.bufsize, "initial": self.initial, "seed": self.seed}
        return {"stage": "detshuffle", **settings}


class _ShuffleIterator(StageIterator):
    """A buffer of items, and the numbers of these items in the source."""

    def __init__(
        self, stage: Shuffle, source: Iterator[Any], seed_of: Callable[[int], int]
    ) -> None:
        self._stage = stage
        self._log = ReplayLog(source)
        self._buffer: list[Any] = []
        self._numbers: list[int] = []
        self._draws = Draws(seed_of) if stage.rng is None else UserDraws(stage.rng)
        self._taken = 0
        self._is_restored = False
        super().__init__(source)

    def _run(self) -> Iterator[Any]:
        buffer, numbers, draw = self._buffer, self._numbers, self._draws.below
        items = iter(self._source)
        if self._is_restored:
            self._refill(items)
        yield from self._filling(items)
        if len(buffer) == self._stage.bufsize:
            yield from self._exchanging(items)
        while buffer:
            yield _remove(buffer, numbers, draw(len(buffer)))

    def _filling(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield one item for every two that are taken, until the buffer is full."""
        size, buffer, numbers = self._stage.bufsize, self._buffer, self._numbers
        count = min(max(1, self._stage.initial), size) if not self._taken else 2
        while len(buffer) < size:
            self._log.note(self._taken, self._oldest)
            more = list(islice(items, min(count, size - len(buffer))))
            buffer += more
            numbers += range(self._taken, self._taken + len(more))
            self._taken += len(more)
            if len(buffer) == size or not more:
                return
            count = 2
            yield _remove(buffer, numbers, self._draws.below(len(buffer)))

    def _exchanging(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield an item of the full buffer for each one that is taken."""
        size, buffer, numbers = self._stage.bufsize, self._buffer, self._numbers
        while True:
            self._log.note(self._taken, self._oldest)
            draws = self._draws.block()
            for fraction in islice(draws, NOTE_ITEMS):
                item = next(items, _END)
                if item is _END:
                    return
                slot = int(fraction * size)
                chosen = buffer[slot]
                buffer[slot] = item
                numbers[slot] = self._taken
                self._taken += 1
                yield chosen

    def state_dict(self) -> State:
        # Right after a state was loaded, it is still the state.
        oldest = 0 if self._is_restored else self._oldest()
        return {
            "replay": self._log.state_at(oldest),
            "taken": self._taken - oldest,
            "kept": [number - oldest for number in self._numbers],
            **self._draws.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        replay, self._taken, kept, drawn = unpack(state, "replay", "taken", "kept", "drawn")
        self._log.load_state_dict(replay)
        self._numbers += kept
        self._draws.load_state_dict({"drawn": drawn})
        self._is_restored = True

    def _oldest(self) -> int:
        # The last item is read again even if it is not needed: whether any was taken decides how
        # many are taken next.
        return min(self._numbers, default=max(0, self._taken - 1))

    def _refill(self, items: Iterator[Any]) -> None:
        """Read the items of a restored buffer again."""
        self._log.note(0, int)
        self._is_restored = False
        slots = {number: slot for slot, number in enumerate(self._numbers)}
        self._buffer += [None] * len(slots)
        for number, item in enumerate(islice(items, self._taken)):
            if number in slots:
                self._buffer[slots.pop(number)] = item
        check_reached(len(slots))


_END = object()


def _remove(buffer: list[Any], numbers: list[int], pick: int) -> Any:
    """Remove an item; the last one fills the gap, at the same cost for every position."""
    numbers[pick] = numbers[-1]
    numbers.pop()
    item = buffer[pick]
    buffer[pick] = buffer[-1]
    buffer.pop()
    return item
