"""Patterns that realise weights almost exactly in every interval.

The weights become whole numbers t_d with sum T, and a pattern of T entries in which the j-th
entry of number d lies near (j + u)/t_d of the way. It is read over and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, fsum, log2

import numpy as np
from numpy.typing import NDArray

from energon.plan.leaf import Ints
from energon.plan.seeds import combine, derive_seed

MIN_PATTERN, MAX_PATTERN = 4096, 65536


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which of some numbered things comes at each place."""

    number: NDArray[np.int32]
    """What comes, for each entry."""
    rank: Ints
    """How many entries of the same number come before, for each entry."""
    counts: Ints
    """How many entries each number has."""

    @property
    def size(self) -> int:
        """How many entries there are."""
        return len(self.number)

    def place_of(self, number: int, turn: int) -> int:
        """Return at which entry of the repeated pattern `number` comes for the `turn`-th time."""
        rounds, rank = divmod(turn, int(self.counts[number]))
        return rounds * self.size + int(self._places[self._starts[number] + rank])

    @cached_property
    def _places(self) -> Ints:
        return np.argsort(self.number, kind="stable")

    @cached_property
    def _starts(self) -> Ints:
        return np.cumsum(self.counts) - self.counts

    def count_until(self, entries: int) -> Ints:
        """Return how often each number comes in the first `entries` of the repeated pattern."""
        rounds, at = divmod(entries, self.size)
        counts: Ints = np.bincount(self.number[:at], minlength=len(self.counts))
        counts += rounds * self.counts
        return counts


@lru_cache(maxsize=1024)
def make_pattern(weights: tuple[float, ...], seed: int) -> Pattern:
    """Return a pattern that realises `weights`."""
    counts = apportion(weights, _pattern_size(weights))
    number = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(number)) - start
    key = np.array([derive_seed(seed, "pattern")], np.uint64)
    noise = combine(key, number.astype(np.int64), rank)
    jitter = (noise >> np.uint64(11)).astype(np.float64) / (1 << 53)
    order = np.argsort((rank + jitter) / counts[number], kind="stable")
    return Pattern(number[order], rank[order], counts)


def apportion(weights: Sequence[float], total: int) -> Ints:
    """Return whole numbers with sum `total` in proportion to `weights` (largest remainder).

    A weight above 0 gets at least 1.
    """
    shares = np.asarray(weights, np.float64)
    shares = shares / shares.max()
    exact = shares / shares.sum() * total
    counts: Ints = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    starved = (counts == 0) & (shares > 0)
    counts[starved] = 1
    counts[np.argmax(counts)] -= int(starved.sum())
    return counts


def _pattern_size(weights: Sequence[float]) -> int:
    """Return T, a power of 2 large enough for the smallest share to be within a hundredth."""
    smallest = min(weight for weight in weights if weight) / fsum(weights)
    wanted = 64 * max(len(weights), min(MAX_PATTERN, 1 / smallest))
    return min(MAX_PATTERN, max(MIN_PATTERN, 1 << ceil(log2(wanted))))
