"""Blend leaves by weight, in shares that are nearly exact in every interval.

The weights become whole numbers t_d with sum T, and a pattern of T entries in which the j-th
entry of leaf d lies near (j + u)/t_d of the way. Every lane reads the pattern over and over,
each from a phase of its own, so lanes agree on shares but not on turns. How often a leaf came
before any row follows from the number of full rounds and a rank in the pattern; with it, the
number of the draw, and everything else is the order of the leaf.

Weights may change at rows: then the counts at the change are the base of what follows, and
the draws of a leaf go on without a gap, so its epochs stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.plan.leaf import Ints, LeafOrder, PlanLeaf
from energon.plan.permutation import permute
from energon.plan.rows import Rows
from energon.plan.seeds import combine, derive_seed, mix

MIN_PATTERN, MAX_PATTERN = 4096, 65536


@dataclass(frozen=True)
class BlendPlan:
    """An endless blend.

    Args:
        leaves: The leaves; their own weights do not count.
        lanes: V.
        seed: Seed of the run.
        schedule: Rows in ascending order, the first 0, with the weights from there on.
    """

    leaves: tuple[PlanLeaf, ...]
    lanes: int
    seed: int
    schedule: tuple[tuple[int, tuple[float, ...]], ...]

    def __post_init__(self) -> None:
        starts = [row for row, _ in self.schedule]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ConfigError(f"a schedule starts at row 0 and ascends, got rows {starts}")
        for row, weights in self.schedule:
            if len(weights) != len(self.leaves):
                raise ConfigError(
                    f"row {row} has {len(weights)} weights for {len(self.leaves)} leaves"
                )
            if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
                raise ConfigError(
                    f"weights {list(weights)} at row {row}: wanted are numbers from 0, not all 0"
                )

    def num_rows(self, lane: int) -> int | None:
        """Return None: a blend has no end."""
        return None

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane."""
        return self.at(lane, np.arange(start, start + count, dtype=np.int64))

    def at(self, lane: int, rows: Ints) -> Rows:
        """Return what comes at `rows` of a lane, in any order."""
        leaf, draws = self.draws(lane, rows)
        epoch, ordinal = self._order.draw(lane, leaf, draws)
        return Rows(leaf, epoch, ordinal)

    def draws(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return for each row the leaf, and how often the lane drew from it before."""
        if len(self.leaves) == 1:
            return np.zeros(len(rows), np.int32), rows
        starts = [row for row, _ in self.schedule]
        stages = np.searchsorted(starts, rows, side="right") - 1
        leaf = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        for stage in np.unique(stages).tolist():
            chosen = slice(None) if (stages == stage).all() else np.flatnonzero(stages == stage)
            pattern = self._pattern(stage)
            phase = self._phase(lane, pattern)
            rounds, at = np.divmod(rows[chosen] - starts[stage] + phase, pattern.size)
            found = pattern.leaf[at]
            leaf[chosen] = found
            draws[chosen] = (
                rounds * pattern.counts[found] + pattern.rank[at] + self._base(lane, stage)[found]
            )
        return leaf, draws

    def _base(self, lane: int, stage: int) -> Ints:
        """Return what to add to the counts of a stage, so that they count all draws."""
        bases = self._bases.setdefault(lane, [])
        while len(bases) <= stage:
            number = len(bases)
            pattern = self._pattern(number)
            before = pattern.count_until(self._phase(lane, pattern))
            done = np.zeros(len(self.leaves), np.int64)
            if number:
                last = self._pattern(number - 1)
                length = self.schedule[number][0] - self.schedule[number - 1][0]
                done = bases[-1] + last.count_until(self._phase(lane, last) + length)
            bases.append(done - before)
        return bases[stage]

    def _phase(self, lane: int, pattern: _Pattern) -> int:
        lanes = np.array([self.lanes])
        key = np.array([derive_seed(self.seed, "phase")], np.uint64)
        return int(permute(np.array([lane]), lanes, key)[0]) * pattern.size // self.lanes

    def _pattern(self, stage: int) -> _Pattern:
        return make_pattern(self.schedule[stage][1], self.seed)

    @cached_property
    def _order(self) -> LeafOrder:
        return LeafOrder(self.leaves, lanes=self.lanes, seed=self.seed)

    @cached_property
    def _bases(self) -> dict[int, list[Ints]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("leaves", "lanes", "seed", "schedule")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, eq=False)
class _Pattern:
    leaf: NDArray[np.int32]
    """Which leaf, for each entry."""
    rank: Ints
    """How many entries of the same leaf come before, for each entry."""
    counts: Ints
    """How many entries each leaf has."""

    @property
    def size(self) -> int:
        return len(self.leaf)

    def count_until(self, entries: int) -> Ints:
        """Return how often each leaf comes in the first `entries` of the repeated pattern."""
        rounds, at = divmod(entries, self.size)
        counts: Ints = np.bincount(self.leaf[:at], minlength=len(self.counts))
        counts += rounds * self.counts
        return counts


@lru_cache(maxsize=4096)
def make_pattern(weights: tuple[float, ...], seed: int) -> _Pattern:
    """Return a pattern that realises `weights`."""
    counts = apportion(weights, _pattern_size(len(weights)))
    leaf = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(leaf)) - start
    key = np.array([derive_seed(seed, "pattern")], np.uint64)
    noise = combine(key, leaf.astype(np.int64), rank)
    jitter = (noise >> np.uint64(11)).astype(np.float64) / (1 << 53)
    order = np.lexsort((mix(noise), (rank + jitter) / counts[leaf]))
    return _Pattern(leaf[order], rank[order], counts)


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


def _pattern_size(num_leaves: int) -> int:
    wanted = 1 << (64 * num_leaves - 1).bit_length()
    return min(MAX_PATTERN, max(MIN_PATTERN, wanted))
