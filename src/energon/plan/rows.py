"""What a plan is, and the plans that are made of another one.

A plan says for each row of a lane which leaf, epoch and sample come there. Around the plan of a
blend or a line there may be two others: one shuffles its rows in windows (`WindowPlan`), one
deals them to several lanes (`DealtPlan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.plan.seeds import U64, combine, derive_seed, permute, unpermuted


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


COUNTED_ROWS = 4096
"""Rows before the present one that are counted one by one; of the others a lane has its share."""


@dataclass(frozen=True)
class DealtPlan:
    """The plan of lanes that share streams.

    A worker of a new run reads one *stream*: rows in an order of their own, with slices of their
    own. So that the run can be resumed on more ranks, each stream is dealt to as many lanes, batch
    by batch: of U streams and V lanes, lane v has every V / U-th batch of stream v mod U. The
    batches of all lanes, in order, are those of the streams, in order, however many lanes there
    are, and the last batch of a stream is the only one that can be smaller than the others.
    Whoever hosts all lanes of a stream reads it as a whole.

    Args:
        plan: Of the streams, which are its lanes.
        lanes: V, a multiple of the number of streams.
        stripe: Consecutive rows of a stream that go to the same lane: a batch.
    """

    plan: Plan
    lanes: int
    stripe: int

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices: v, v + U, v + 2·U and so on."""
        return self.lanes // self.plan.lanes

    def stream_of(self, lane: int) -> int:
        """Return which stream a lane reads."""
        return lane % self.plan.lanes

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return which rows of its stream some rows of a lane are."""
        turn, within = np.divmod(rows, self.stripe)
        number = lane // self.plan.lanes
        return (turn * self.lanes_of_stream + number) * self.stripe + within

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream."""
        full, rest = divmod(stream_row, self.stripe * self.lanes_of_stream)
        rest -= lane // self.plan.lanes * self.stripe
        return full * self.stripe + min(self.stripe, max(0, rest))

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        end = self.plan.num_rows(self.stream_of(lane))
        return None if end is None else self.rows_before(lane, end)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> DealtPlan:
        """Return the plan of a run in which the stream of `lane` took up other mixes at `rows`.

        These are rows of the stream: all of its lanes have to be given the same.
        """
        if not rows:
            return self
        return replace(self, plan=self.plan.with_changes(self.stream_of(lane), rows))

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        end = self.num_rows(lane)
        stop = start + count if end is None else min(start + count, end)
        return self.at(lane, np.arange(start, max(start, stop), dtype=np.int64), gaps=True)

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return what comes at `rows` of a lane, in any order."""
        return self.plan.at(self.stream_of(lane), self.stream_rows(lane, rows), gaps=gaps)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Of what is long ago, each lane of a stream has an equal share.
        """
        first = max(0, row - COUNTED_ROWS) // self.stripe * self.stripe
        counts = self.plan.leaf_counts(self.stream_of(lane), first * self.lanes_of_stream)
        counts = counts / self.lanes_of_stream
        leaf = self.rows(lane, first, row - first).leaf
        recent: NDArray[np.float64] = counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))
        return recent

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return in which lane and row a sample comes in an epoch of its leaf."""
        found = self.plan.find(leaf, epoch, ordinal)
        return None if found is None else self.lane_of(*found)

    def lane_of(self, stream: int, row: int) -> tuple[int, int]:
        """Return to which lane a row of a stream is dealt, and as which of its rows."""
        batch, within = divmod(row, self.stripe)
        turn, number = divmod(batch, self.lanes_of_stream)
        return number * self.plan.lanes + stream, turn * self.stripe + within


def plan_together(plan: Plan, wanted: Sequence[tuple[int, int, int]]) -> list[Rows]:
    """Return rows of several lanes of one stream; fewer only where lanes end.

    One call for all costs a fraction of one for each.

    Args:
        plan: The order.
        wanted: For each lane its number, the first row, and how many.
    """
    if len(wanted) == 1 or not isinstance(plan, DealtPlan):
        return [plan.rows(lane, start, count) for lane, start, count in wanted]
    ends = [plan.num_rows(lane) for lane, _, _ in wanted]
    counts = [
        count if end is None else max(0, min(count, end - start))
        for (_, start, count), end in zip(wanted, ends, strict=True)
    ]
    edges = np.cumsum([0, *counts])
    rows = np.arange(edges[-1]) + np.repeat([start for _, start, _ in wanted] - edges[:-1], counts)
    number = np.repeat([lane // plan.plan.lanes for lane, _, _ in wanted], counts)
    turn, within = np.divmod(rows, plan.stripe)
    rows = (turn * plan.lanes_of_stream + number) * plan.stripe + within
    found = plan.plan.at(plan.stream_of(wanted[0][0]), rows, gaps=True)
    return [found.pick(slice(start, stop)) for start, stop in pairwise(edges.tolist())]


@dataclass(frozen=True)
class WindowPlan:
    """Permutes each run of `size` rows of every lane of `plan`: a shuffle buffer without a buffer.

    A window in which a run took up another mix keeps all of its rows: some of them have been given
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

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices."""
        return self.plan.lanes_of_stream

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return `rows`: each lane is a stream."""
        return rows

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return `stream_row`: each lane is a stream."""
        return stream_row

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        return self.plan.num_rows(lane)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> WindowPlan:
        """Return the plan of a run in which `lane` took up other mixes at `rows`.

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
        """Return how often each leaf comes in the rows of a lane before `row`."""
        begin = int(self._windows(lane, np.array([row]))[0][0])
        counts = self.plan.leaf_counts(lane, begin)
        leaf = self.rows(lane, begin, row - begin).leaf
        return counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return in which lane and row a sample comes in an epoch of its leaf, if it does."""
        found = self.plan.find(leaf, epoch, ordinal)
        if found is None:
            return None
        lane, row = found
        begin, size = self._windows(lane, np.array([row]))
        start = int(begin[0])
        return lane, start + unpermuted(row - start, int(size[0]), self._keys(lane, begin))

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return what comes at `rows` of a lane, in any order."""
        return self.plan.at(lane, self.unmixed(lane, rows), gaps=gaps)

    def unmixed(self, lane: int, rows: Ints) -> Ints:
        """Return which rows of the plan come at `rows`."""
        begin, size = self._windows(lane, rows)
        return begin + permute(rows - begin, size, self._keys(lane, begin))

    def window_of(self, lane: int, row: int) -> int:
        """Return with which row the window of a row begins."""
        return int(self._windows(lane, np.array([row], np.int64))[0][0])

    def _windows(self, lane: int, rows: Ints) -> tuple[Ints, Ints]:
        """Return for each row with which row its window begins, and how many rows that has."""
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
