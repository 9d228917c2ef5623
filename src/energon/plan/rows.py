"""What a plan is: for each row of a lane, which leaf, epoch and sample."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """Some rows of a lane; three arrays of equal length."""

    leaf: NDArray[np.int32]
    """Index of the leaf; below 0 for a gap: a sample of a dataset that is gone."""
    epoch: NDArray[np.int64]
    """Which pass over the leaf."""
    ordinal: NDArray[np.int64]
    """Number of the sample within the leaf."""

    def pick(self, chosen: NDArray[np.int64] | slice) -> Rows:
        """Return the rows at some places."""
        return Rows(self.leaf[chosen], self.epoch[chosen], self.ordinal[chosen])


class Plan(Protocol):
    """The order of a run: immutable, small, and a pure function of its parameters."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices, see `DealtPlan`."""

    def stream_rows(self, lane: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which rows of the stream that a lane reads some of its rows are."""

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream."""

    def at(self, lane: int, rows: NDArray[np.int64], *, gaps: bool = False) -> Rows:
        """Return what comes at `rows` of a lane, in any order; all must exist.

        Raises:
            StateError: If a dataset is gone from which a row was drawn, unless `gaps` is set.
        """

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count`; fewer only at the end of a finite plan.

        Where the mix was changed, a stream may lack samples of a dataset that is gone since:
        there are gaps.
        """

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> Plan:
        """Return the plan of a run in which `lane` took up each mix but the first at `rows`."""

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Where several leaves are one line, they are counted by their parts of it.
        """

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return in which lane and row a sample comes in an epoch of its leaf.

        None if it does not: the plan ends before, or draws from the leaf no longer.

        Raises:
            ConfigError: If the leaf is drawn from with replacement.
        """


class StreamPlan(Plan, Protocol):
    """A plan each of whose lanes is a stream, and that knows what is drawn from its sources."""

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> StreamPlan:
        """Return the plan of a run in which `lane` took up each mix but the first at `rows`."""

    def numbers(
        self, lane: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return for each row the source, and the number of the draw among all from it."""

    def drawn(self, lane: int, row: int) -> NDArray[np.int64]:
        """Return how often each source comes in the rows of a lane before `row`."""

    def quota(self, lane: int, source: int, total: int) -> int:
        """Return how many of the first `total` draws from a source are those of a lane."""
