"""Random numbers that go on where they were, without a generator being saved."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from operator import length_hint
from typing import Any

from energon.errors import ConfigError, StateError
from energon.webdataset.stages.base import State


def default_seed(seed: int | str | None = None) -> int:
    """Return a seed as a number: `seed`, or WDS_SEED of the environment, or 0.

    Raises:
        ConfigError: If it is no whole number.
    """
    found = os.environ.get("WDS_SEED", "0") if seed is None else seed
    try:
        return int(found)
    except (TypeError, ValueError) as error:
        where = "WDS_SEED" if seed is None else "seed"
        raise ConfigError(f"{where}={found!r}: expected a whole number") from error


BLOCK_DRAWS = 4096
"""So many numbers come from one generator, so that any number is found at once."""


class Draws:
    """Numbers that are a function of a seed and of how many were drawn before.

    Args:
        seed_of: Gives the seed of each block of numbers.
    """

    def __init__(self, seed_of: Callable[[int], int]) -> None:
        self._seed_of = seed_of
        self._blocks = 0
        self._block: Iterator[float] = iter(())

    def block(self) -> Iterator[float]:
        """Return numbers from 0 up to 1 that are ready: what is taken of these was drawn."""
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
        return int(next(self.block()) * limit)

    def state_dict(self) -> State:
        """Return how many numbers were drawn."""
        return {"drawn": self._blocks * BLOCK_DRAWS - length_hint(self._block)}

    def load_state_dict(self, state: State) -> None:
        """Go on after so many numbers."""
        self._blocks, taken = divmod(state["drawn"], BLOCK_DRAWS)
        for _ in range(taken):
            self.fraction()


class UserDraws:
    """Numbers of a generator that belongs to the user, which is saved as it is."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def block(self) -> Iterator[float]:
        """Return numbers from 0 up to 1, each drawn when it is taken."""
        return iter(self._rng.random, None)

    def fraction(self) -> float:
        """Return a number from 0 up to, but not including, 1."""
        return self._rng.random()

    def below(self, limit: int) -> int:
        """Return a whole number from 0 up to, but not including, `limit`."""
        return int(self._rng.random() * limit)

    def state_dict(self) -> State:
        """Return the state of the generator."""
        if not isinstance(self._rng, random.Random):
            raise StateError(
                f"the pipeline cannot be saved, because shuffle draws from {self._rng!r}; pass "
                "seed instead of rng, or a random.Random"
            )
        version, numbers, gauss = self._rng.getstate()
        return {"drawn": [version, list(numbers), gauss]}

    def load_state_dict(self, state: State) -> None:
        """Set the generator to a saved state."""
        version, numbers, gauss = state["drawn"]
        self._rng.setstate((version, tuple(numbers), gauss))


def make_draws(rng: Any, seed_of: Callable[[int], int]) -> Draws | UserDraws:
    """Return what to draw from: the user's generator if there is one."""
    return Draws(seed_of) if rng is None else UserDraws(rng)
