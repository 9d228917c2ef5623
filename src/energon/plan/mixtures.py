"""The patterns of a blend: which one holds over some rows, as its shares say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from energon.plan.curve import Clock
from energon.plan.mix import Mix
from energon.plan.pattern import Pattern, make_pattern

Mixture = tuple[Pattern, NDArray[np.int32]]
"""A pattern, and the source that each of its numbers stands for."""


class Mixtures:
    """Patterns by rows, each made once: a run may have thousands of lanes that ask for the same.

    Args:
        name: Returns the name of a source.
        clock: Tells the rows of positions.
        seed: Seed of the run.
    """

    def __init__(self, name: Callable[[int], str], clock: Clock, seed: int) -> None:
        self._name = name
        self._clock = clock
        self._seed = seed
        self._known: dict[tuple[object, ...], Mixture | None] = {}

    def of(self, mix: Mix, row: int, stop: int | None, used: Sequence[int]) -> Mixture | None:
        """Return what is drawn over rows without a change; None if nothing is left to draw.

        Args:
            mix: Shares; kept by the caller for as long as this lives.
            row: First row.
            stop: Row behind the last; None for no end.
            used: Sources that are used up.
        """
        key = (id(mix), row, stop, tuple(used))
        if key not in self._known:
            shares = mix.shares(row, stop, self._clock, used)
            self._known[key] = None if shares is None else self._make(mix, shares)
        return self._known[key]

    def _make(self, mix: Mix, shares: Sequence[float]) -> Mixture:
        # By name, so that the order of entries in a document has no say.
        named = sorted(zip(map(self._name, mix.sources), mix.sources, shares, strict=True))
        pattern = make_pattern(tuple(share for *_, share in named), self._seed)
        return pattern, np.array([source for _, source, _ in named], np.int32)
