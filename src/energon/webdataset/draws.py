"""Random numbers that go on where they were, without a generator being saved."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from energon.errors import StateError
from energon.webdataset.stage import State

BLOCK_DRAWS = 4096
"""So many numbers come from one generator, so that any number is found at once."""


class Draws:
    """Numbers that are a function of a seed and of how many were drawn before.

    Args:
        seed_of: Gives the seed of each block of numbers.
    """

    def __init__(self, seed_of: Callable[[int], int]) -> None:
        self._seed_of = seed_of
        self._drawn = 0
        self._random = random.Random()

    def fraction(self) -> float:
        """Return a number from 0 up to, but not including, 1."""
        if not self._drawn % BLOCK_DRAWS:
            self._random.seed(self._seed_of(self._drawn // BLOCK_DRAWS))
        self._drawn += 1
        return self._random.random()

    def below(self, limit: int) -> int:
        """Return a whole number from 0 up to, but not including, `limit`."""
        return int(self.fraction() * limit)

    def state_dict(self) -> State:
        """Return how many numbers were drawn."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: State) -> None:
        """Go on after so many numbers."""
        drawn = state["drawn"]
        self._drawn = drawn - drawn % BLOCK_DRAWS
        for _ in range(drawn % BLOCK_DRAWS):
            self.fraction()


class UserDraws:
    """Numbers of a generator that belongs to the user, which is saved as it is."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

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
