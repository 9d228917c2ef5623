"""Shuffle the rows of a plan in windows, as a shuffle buffer would, without a buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from energon.plan.find import unpermuted
from energon.plan.leaf import Ints
from energon.plan.permutation import permute
from energon.plan.rows import Plan, Rows
from energon.plan.seeds import combine, derive_seed


@dataclass(frozen=True)
class WindowPlan:
    """Permutes each run of `size` rows of every lane of `plan`.

    Args:
        plan: What to permute.
        size: Rows of a window; the last of a finite plan may be smaller.
        seed: Seed of the run.
    """

    plan: Plan
    size: int
    seed: int

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.plan.lanes

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        return self.plan.num_rows(lane)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> WindowPlan:
        """Return the plan of a run in which `lane` took up other mixes at `rows`."""
        return replace(self, plan=self.plan.with_changes(lane, rows))

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        end = self.num_rows(lane)
        stop = start + count if end is None else min(start + count, end)
        return self.at(lane, np.arange(start, max(start, stop), dtype=np.int64))

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`, but for a window."""
        return self.plan.leaf_counts(lane, row)

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return in which lane and row a sample comes in an epoch of its leaf, if it does."""
        found = self.plan.find(leaf, epoch, ordinal)
        if found is None:
            return None
        lane, row = found
        window, inner = divmod(row, self.size)
        end = self.num_rows(lane)
        size = self.size if end is None else min(self.size, end - window * self.size)
        key = np.array([derive_seed(self.seed, "window", lane)], np.uint64)
        return lane, window * self.size + unpermuted(inner, size, combine(key, window))

    def at(self, lane: int, rows: Ints) -> Rows:
        """Return what comes at `rows` of a lane, in any order."""
        window, inner = np.divmod(rows, self.size)
        size = np.full(len(rows), self.size, np.int64)
        end = self.num_rows(lane)
        if end is not None:
            size = np.minimum(size, end - window * self.size)
        key = np.array([derive_seed(self.seed, "window", lane)], np.uint64)
        inner = permute(inner, size, combine(key, window))
        return self.plan.at(lane, window * self.size + inner)
