"""Deal the batches of a stream to several lanes.

A worker of a new run reads one *stream*: rows in an order of their own, with slices of their
own. That it can be resumed on more ranks, each stream is dealt to as many lanes, batch by batch:
of U streams and V lanes, lane v has every V / U-th batch of stream v mod U. So the batches of all
lanes, in order, are those of the streams, in order, however many lanes there are, and the last
batch of a stream is the only one that can be smaller than the others. A rank that hosts all lanes
of a stream reads it as a whole.

A run that continues with smaller batches divides each of its batches into *parts*, which are the
batches of consecutive lanes: so the parts of whole batches come together, in order, and the
batches of a step of the training have the same samples as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.plan.randomness import divided
from energon.plan.rows import COUNTED_ROWS, DrawPlan, Plan, Rows, dealt_rows


@dataclass(frozen=True)
class Deal:
    """Which rows of which stream each lane has.

    Args:
        lanes: V, a multiple of the numbers of streams and parts.
        streams: U.
        stripe: Consecutive rows of a stream that go to the same lane: a batch.
        parts: How many consecutive lanes have batches of the same stream.

    Example:
        >>> Deal(lanes=8, streams=2, stripe=4).lanes_of(1)
        [1, 3, 5, 7]
        >>> Deal(lanes=8, streams=2, stripe=4, parts=2).lanes_of(1)
        [2, 3, 6, 7]
    """

    lanes: int
    streams: int
    stripe: int
    parts: int = 1

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes share a stream."""
        return self.lanes // self.streams

    def stream_of(self, lane: int) -> int:
        """Return the stream that a lane reads."""
        return lane // self.parts % self.streams

    def lanes_of(self, stream: int) -> list[int]:
        """Return the lanes that share a stream, in order."""
        return [self._lane_at(stream, lane_index) for lane_index in range(self.lanes_of_stream)]

    def lane_index_of(self, lane: int) -> int:
        """Return the index of a lane among those of its stream."""
        whole, part = divmod(lane, self.parts)
        return whole // self.streams * self.parts + part

    def _lane_at(self, stream: int, lane_index: int) -> int:
        whole, part = divmod(lane_index, self.parts)
        return (whole * self.streams + stream) * self.parts + part

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return the rows of its stream that some rows of a lane are."""
        return self.rows_of_index(self.lane_index_of(lane), rows)

    def rows_of_index(self, lane_index: int | Ints, rows: Ints) -> Ints:
        """Return the rows of a stream, for the index of the lane in it, or one for each row."""
        turn, within = divided(rows, self.stripe)
        return (turn * self.lanes_of_stream + lane_index) * self.stripe + within

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream."""
        return dealt_rows(stream_row, self.lane_index_of(lane), self.lanes_of_stream, self.stripe)

    def lane_of(self, stream: int, row: int) -> tuple[int, int]:
        """Return the lane that a row of a stream is dealt to, and its row there."""
        batch, within = divmod(row, self.stripe)
        turn, lane_index = divmod(batch, self.lanes_of_stream)
        return self._lane_at(stream, lane_index), turn * self.stripe + within


@dataclass(frozen=True)
class DealtPlan:
    """The plan of lanes that share streams.

    Args:
        plan: Of the streams, which are its lanes.
        deal: Which lanes share which stream.
    """

    plan: DrawPlan
    deal: Deal

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.deal.lanes

    @property
    def lanes_of_stream(self) -> int:
        """How many lanes read the same slices."""
        return self.deal.lanes_of_stream

    def stream_of(self, lane: int) -> int:
        """Return the stream that a lane reads."""
        return self.deal.stream_of(lane)

    def stream_rows(self, lane: int, rows: Ints) -> Ints:
        """Return the rows of its stream that some rows of a lane are."""
        return self.deal.stream_rows(lane, rows)

    def rows_before(self, lane: int, stream_row: int) -> int:
        """Return how many rows of a lane come before a row of its stream."""
        return self.deal.rows_before(lane, stream_row)

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None means no end."""
        end = self.plan.num_rows(self.stream_of(lane))
        return None if end is None else self.rows_before(lane, end)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> DealtPlan:
        """Return the plan of a run in which the stream of `lane` changed its mix at `rows`.

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
        """Return the samples at `rows` of a lane, in any order."""
        return self.plan.at(self.stream_of(lane), self.stream_rows(lane, rows), gaps=gaps)

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        """Return the leaf of each of `rows` of a lane; below 0 for a gap."""
        return self.plan.leaf_of(self.stream_of(lane), self.stream_rows(lane, rows))

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`.

        Of what is long ago, each lane of a stream has an equal share.
        """
        first = max(0, row - COUNTED_ROWS) // self.deal.stripe * self.deal.stripe
        counts = self.plan.leaf_counts(self.stream_of(lane), first * self.lanes_of_stream)
        counts = counts / self.lanes_of_stream
        leaf = self.leaf_of(lane, np.arange(first, row, dtype=np.int64))
        recent: NDArray[np.float64] = counts + np.bincount(leaf[leaf >= 0], minlength=len(counts))
        return recent

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf."""
        stream_row = self.plan.find(leaf, epoch, ordinal)
        return None if stream_row is None else self.deal.lane_of(*stream_row)


def rows_of_lanes(
    plan: DealtPlan | DrawPlan, requests: Sequence[tuple[int, int, int]]
) -> tuple[Rows, Ints]:
    """Return rows of several lanes one after another; fewer only where lanes end.

    One call for all costs a fraction of one for each.

    Args:
        plan: The order.
        requests: For each lane its number, the first row, and how many.

    Returns:
        The rows, and where those of each lane begin, with the end.
    """
    drawn_by = plan.plan if isinstance(plan, DealtPlan) else plan
    rows: list[Ints] = []
    lanes_of: dict[int, list[int]] = {}
    for index, (lane, start, count) in enumerate(requests):
        end = plan.num_rows(lane)
        stop = start + count if end is None else max(start, min(start + count, end))
        rows.append(plan.stream_rows(lane, np.arange(start, stop, dtype=np.int64)))
        stream = plan.stream_of(lane) if isinstance(plan, DealtPlan) else lane
        lanes_of.setdefault(stream, []).append(index)
    edges = np.cumsum([0, *map(len, rows)])
    source, numbers = np.empty(edges[-1], np.int32), np.empty(edges[-1], np.int64)
    for stream, indices in lanes_of.items():
        at = np.concatenate([np.arange(*edges[index : index + 2]) for index in indices])
        own = np.concatenate([rows[index] for index in indices])
        source[at], numbers[at] = drawn_by.numbers(stream, own)
    return drawn_by.samples(source, numbers, gaps=True), edges


def plan_together(plan: Plan, requests: Sequence[tuple[int, int, int]]) -> list[Rows]:
    """Return rows of several lanes, see `rows_of_lanes`."""
    if not isinstance(plan, DealtPlan):
        return [plan.rows(lane, start, count) for lane, start, count in requests]
    rows, edges = rows_of_lanes(plan, requests)
    return [rows.pick(slice(start, stop)) for start, stop in pairwise(edges.tolist())]
