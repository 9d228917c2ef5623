"""The contract of a plan, and the plan that shuffles the rows of another one in windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from energon.arrays import U64, Ints
from energon.plan.randomness import (
    combine,
    derive_seed,
    permute,
    unpermuted,
)

COUNTED_ROWS = 4096
"""This many rows before the present one are counted one by one; of what they are part of, a lane or
a window has its share of all others."""


class Rows(NamedTuple):
    """Some rows of a lane; three arrays of equal length."""

    leaf: NDArray[np.int32]
    """Index of the leaf; below 0 for a gap: a sample of a dataset that is gone."""
    epoch: NDArray[np.int64]
    """Which pass over the leaf."""
    ordinal: NDArray[np.int64]
    """Number of the sample within the leaf."""

    def pick(self, chosen: NDArray[np.int64] | slice) -> Rows:
        """Return some of the rows."""
        return Rows(self.leaf[chosen], self.epoch[chosen], self.ordinal[chosen])


def dealt_rows(count: int, lane: int, lanes: int, stripe: int) -> int:
    """Return how many of the first `count` rows a lane has, if `stripe` at a time go to each.

    Example:
        >>> [dealt_rows(7, lane, lanes=2, stripe=2) for lane in range(2)]
        [4, 3]
    """
    full, rest = divmod(max(0, count), stripe * lanes)
    return full * stripe + min(stripe, max(0, rest - lane * stripe))


class Plan(Protocol):
    """The order of a run: immutable, small, and a pure function of its parameters."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices, see `DealtPlan`."""

    def stream_rows(self, lane: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of its stream that some rows of a lane are."""

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream."""

    def at(self, lane: int, rows: NDArray[np.int64], *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order; all rows must exist.

        Raises:
            StateError: If a dataset is gone from which a row was drawn, unless `gaps` is set.
        """

    def leaf_of(self, lane: int, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return which leaf comes at `rows` of a lane; below 0 for a gap.

        A fraction of the work of `at`: the order within leaves is left out.
        """

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count`; fewer only at the end of a finite plan.

        Where the mix was changed, a stream may lack samples of a dataset that is gone since:
        there are gaps.
        """

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> Self:
        """Return the plan of a run in which `lane` changed its mix at `rows`."""

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Where several leaves are one line, they are counted by their parts of it.
        """

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf.

        None if it does not: the plan ends before, or draws from the leaf no longer.

        Raises:
            ConfigError: If the leaf is drawn from with replacement.
        """


class DrawPlan(Plan, Protocol):
    """A plan that tells draws from their samples, so that those of many lanes are found at once."""

    def numbers(
        self, lane: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the source of each row, and the number of the draw among all from that source."""

    def samples(
        self, source: NDArray[np.int32], numbers: NDArray[np.int64], *, gaps: bool = False
    ) -> Rows:
        """Return the samples that `numbers` returns the draws of; see `at`."""


class StreamPlan(DrawPlan, Protocol):
    """A plan whose lanes are streams, with the draws from its sources."""

    def drawn(self, lane: int, row: int) -> NDArray[np.int64]:
        """Return how often each source comes in the rows of a lane before `row`."""

    def quota(self, lane: int, source: int, total: int) -> int:
        """Return how many of the first `total` draws from a source are those of a lane."""


class LanesAreStreams:
    """The answers of a `StreamPlan` about its streams."""

    lanes_of_stream = 1

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return `rows`."""
        return rows

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return `stream_row`."""
        return stream_row


@dataclass(frozen=True)
class WindowPlan(LanesAreStreams):
    """Permutes each run of `size` rows of every lane of `plan`: a shuffle buffer without a buffer.

    A window in which a run changed its mix keeps all of its rows: some of them have been given
    already, and each of the others is one that was not. So the new mix begins with the next
    window, and windows are counted from there.

    Args:
        plan: What to permute.
        size: Rows of a window; the last one before an end or a change of the mix may be smaller.
        seed: Seed of the run.
        cuts: For each lane, the rows at which its mix changed, where windows start over.
    """

    plan: StreamPlan
    size: int
    seed: int
    cuts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.plan.lanes

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        return self.plan.num_rows(lane)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> WindowPlan:
        """Return the plan of a run in which `lane` changed its mix at `rows`.

        Each begins with the first window of which no row was asked for before its row.
        """
        if not rows and not self.cuts.get(lane):
            return self
        cuts: tuple[int, ...] = ()
        for row in rows:
            end = self.plan.with_changes(lane, cuts).num_rows(lane)
            begin = cuts[-1] if cuts else 0
            cut = begin + -(-max(0, row - begin) // self.size) * self.size
            cuts = (*cuts, cut if end is None else min(cut, end))
        changed = self.plan.with_changes(lane, cuts)
        return replace(self, plan=changed, cuts={**self.cuts, lane: cuts})

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        end = self.num_rows(lane)
        stop = start + count if end is None else min(start + count, end)
        return self.at(lane, np.arange(start, max(start, stop), dtype=np.int64), gaps=True)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Of a large window that is open, its rows so far have their share.
        """
        begin, size = (int(each[0]) for each in self._windows(lane, np.array([row])))
        counts = self.plan.leaf_counts(lane, begin)
        if row - begin > COUNTED_ROWS:
            of_window = self.plan.leaf_counts(lane, begin + size) - counts
            return counts + of_window * ((row - begin) / size)
        leaf = self.leaf_of(lane, np.arange(begin, row, dtype=np.int64))
        return counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf, or None."""
        inner = self.plan.find(leaf, epoch, ordinal)
        if inner is None:
            return None
        lane, row = inner
        begin, size = self._windows(lane, np.array([row]))
        start = int(begin[0])
        return lane, start + unpermuted(row - start, int(size[0]), self._keys(lane, begin))

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order."""
        return self.plan.at(lane, self.unmixed(lane, rows), gaps=gaps)

    def numbers(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the source of each row, and the number of the draw among all from that source."""
        return self.plan.numbers(lane, self.unmixed(lane, rows))

    def samples(self, source: NDArray[np.int32], numbers: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples of draws."""
        return self.plan.samples(source, numbers, gaps=gaps)

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        """Return which leaf comes at `rows` of a lane; below 0 for a gap."""
        return self.plan.leaf_of(lane, self.unmixed(lane, rows))

    def unmixed(self, lane: int, rows: Ints) -> Ints:
        """Return the rows of the inner plan at `rows`."""
        begin, size = self._windows(lane, rows)
        return begin + permute(rows - begin, size, self._keys(lane, begin))

    def window_of(self, lane: int, row: int) -> int:
        """Return the first row of the window of a row."""
        return int(self._windows(lane, np.array([row], np.int64))[0][0])

    def _windows(self, lane: int, rows: Ints) -> tuple[Ints, Ints]:
        """Return the first row of each row's window, and the size of the window."""
        end = self.num_rows(lane)
        bounds = np.array([0, *self.cuts.get(lane, ()), _NEVER if end is None else end], np.int64)
        part = np.searchsorted(bounds[:-1], rows, side="right") - 1
        first = bounds[part]
        begin = first + (rows - first) // self.size * self.size
        return begin, np.minimum(self.size, bounds[part + 1] - begin)

    def _keys(self, lane: int, begin: Ints) -> U64:
        key = np.array([derive_seed(self.seed, "window", lane)], np.uint64)
        return combine(key, begin // self.size)


_NEVER = np.iinfo(np.int64).max
