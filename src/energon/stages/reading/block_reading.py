"""Read the next rows of lanes in blocks.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes.

Lanes whose plan draws from the same slices are read together where one worker hosts several
of them: a block then holds the next batches of all, in the order in which they are delivered.
So it is not larger for many lanes than for one, and takes as few reads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from energon.plan.dealt import DealtPlan, plan_together
from energon.plan.rows import Plan, Rows
from energon.stages.lane import Lane
from energon.stages.reading.blocks import (
    MAX_BLOCK_BYTES,
    MAX_PLANNED_ROWS,
    NO_ROWS,
    BlockPieces,
    LazyRows,
    NextRows,
    ReadAhead,
    Reader,
    ReadSamples,
    ReleasedRows,
    RowsAtOnce,
    SharedBlock,
)

GAP = object()
"""Stands for a sample whose dataset has been removed from the blend."""


class PlannedRows:
    """Rows of a lane or stream that are planned.

    Attributes:
        stop: The row after the last one that was read.
    """

    def __init__(self, stop: int = 0) -> None:
        self.stop = self._planned_start = stop
        self._planned = NO_ROWS
        self._ended = False

    def set_planned(self, rows: Rows, *, requested: int) -> None:
        """Set the planned rows that start at `stop`; fewer than `requested` are the last ones."""
        self._planned, self._planned_start = rows, self.stop
        self._ended = len(rows.leaf) < requested

    def has_planned(self, count: int) -> bool:
        """Return whether the next `count` rows are planned, or all that exist."""
        return self._ended or self.stop + count <= self._planned_start + len(self._planned.leaf)

    @property
    def is_exhausted(self) -> bool:
        """Whether all rows have been read."""
        return self._ended and self.stop == self._planned_start + len(self._planned.leaf)

    def next_rows(self, count: int | None = None) -> Rows:
        """Return the next planned rows, at most `count`; None for all."""
        start = self.stop - self._planned_start
        return self._planned.pick(slice(start, None if count is None else start + count))


class RowsOfLane(PlannedRows):
    """The next rows of a lane: those that are planned, and those that are read but not yet taken.

    Args:
        lane: The lane.
        plan: Returns the plan for a number of lanes; used if the lane has no plan of its own.

    Attributes:
        row: The next row to be taken.
        pending: The samples that were read.
        has_gaps: Whether some of them come from datasets that have been removed.
        used_of_turn: Rows already used for the current batch when `count_used` was called.
    """

    def __init__(self, lane: Lane, plan: Callable[[int], Plan]) -> None:
        super().__init__()
        self.lane = lane
        self.row = 0
        self.pending: list[ReadSamples] = []
        self.has_gaps = False
        self.used_of_turn = 0
        self._noted_row = 0
        self._noted_batch = self.num_batches
        self._make_plan = plan
        self._plan: Plan | None = None

    def go_to(self, row: int) -> None:
        """Discard everything planned or read, and continue at `row`."""
        self.row = self.stop = self._planned_start = self._noted_row = row
        self.pending.clear()
        self._planned = NO_ROWS

    @property
    def plan(self) -> Plan:
        """The order of the lane."""
        if self._plan is None:
            # Created late, because restoring a state may replace the plan.
            self._plan = self.lane.reading.plan or self._make_plan(self.lane.lanes)
        return self._plan

    @property
    def num_batches(self) -> int:
        """Number of batches that the lane has yielded."""
        return self.lane.current.batch or 0

    def count_used(self) -> tuple[int, int]:
        """Return how many batches and rows were used since the last call, and count from here.

        Rows that the current batch had used at the last call, by `used_of_turn`, count as well.
        """
        batch, row = self.num_batches, self.row
        used = batch - self._noted_batch, row - self._noted_row + self.used_of_turn
        self._noted_batch, self._noted_row, self.used_of_turn = batch, row, 0
        return used


class BlocksOfLanes:
    """Reads blocks for one lane, or for several that are read together.

    Args:
        reader: Reads samples.
        lanes_of_stream: How many lanes read the same slices, over all workers.
    """

    def __init__(self, reader: Reader, lanes_of_stream: int) -> None:
        self._reader = reader
        self._lanes_of_stream = lanes_of_stream
        # Lanes keep this object alive, not the reverse, so it is freed with the last of them.
        self._lanes: WeakValueDictionary[int, RowsOfLane] = WeakValueDictionary()
        self._max_block = max(
            1,
            min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, self._reader.mean_sample_bytes))),
        )
        self._next_block = 1
        self._turn_rows = 0.0
        self._ahead: ReadAhead | None = None
        self._has_begun = False
        self._stream = PlannedRows()

    def add(self, rows: RowsOfLane) -> None:
        """Add a lane, or replace it after it has moved to another row."""
        self._lanes[rows.lane.number] = rows

    def read(self, first: RowsOfLane, requested: int) -> None:
        """Read the next rows of all lanes; of `first` at least one, unless it has ended."""
        count = min(self._max_block, max(requested, self._next_block))
        self._next_block = min(self._max_block, 2 * count)
        if self._lanes.get(first.lane.number) is not first:
            self.add(first)
        lanes = self._in_order(first)
        if not self._read_in_turn(lanes, count, requested):
            self._read_shares(lanes, count, requested)

    def _read_in_turn(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> bool:
        """Read the next rows of the stream, if they are the next batches of its lanes in turn.

        They are planned like those of a single lane, and neither divided nor put together.

        Returns:
            Whether they are; if not, nothing is read.
        """
        plan, number = lanes[0].plan, len(lanes)
        if not self._has_begun or self._ahead is not None or not isinstance(plan, DealtPlan):
            return False
        row = plan.deal.row_in_turn([(lane.lane.number, lane.stop) for lane in lanes])
        if row is None or any(lane.row != lane.stop for lane in lanes):
            return False
        stripe, used = plan.deal.stripe, row % plan.deal.stripe
        if requested > stripe - used:
            return False
        if self._stream.stop != row:
            self._stream = PlannedRows(row)
        if not self._stream.has_planned(count):
            ahead = max(count, min(MAX_PLANNED_ROWS, 8 * self._next_block))
            planned = plan.plan.rows(plan.stream_of(lanes[0].lane.number), row, ahead)
            self._stream.set_planned(planned, requested=ahead)
        rows = self._stream.next_rows(count)
        if (rows.leaf < 0).any():
            return False
        size = len(rows.leaf)
        self._stream.stop += size
        bounds = [
            [
                (max(0, start), min(start + stripe, size))
                for start in range(place * stripe - used, size, number * stripe)
            ]
            for place in range(number)
        ]
        if size:
            self._hand_out(self._read_lazily(rows), bounds, lanes, in_turn=True)
        return True

    def _read_shares(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> None:
        """Read the next rows of each lane."""
        pieces = self._share(lanes, count, requested)
        shares = pieces.by_lane(len(lanes))
        blocks = 1 if self._ahead is None else self._ahead.planned_blocks
        if not all(lane.has_planned(blocks * n) for lane, n in zip(lanes, shares, strict=True)):
            self._plan(lanes, [blocks * share for share in shares])
        rows = [lane.next_rows(share) for lane, share in zip(lanes, shares, strict=True)]
        counts = [len(each.leaf) for each in rows]
        if not sum(counts):
            return
        if not self._has_begun:
            self._has_begun = True
            self._ahead = self._reader.read_ahead(self._lanes_of_stream)
        if self._ahead is not None:
            self._ahead.move_to(
                [
                    NextRows(
                        number,
                        partial(lane.plan.rows, number),
                        lane.stop,
                        count,
                        lane.next_rows(),
                    )
                    for lane, count in zip(lanes, counts, strict=True)
                    for number in [lane.lane.number]
                ]
            )
        if counts != shares:
            pieces = pieces.cut(counts)
        # Lanes that use different numbers of rows soon take turns in another order than planned.
        in_step = pieces.are_even
        if not in_step:
            pieces = BlockPieces.of(enumerate(counts))
        together = pieces.in_order(rows)
        if (together.leaf < 0).any():
            for lane in lanes:
                lane.has_gaps = True
            with _uncollected():
                lazy: LazyRows = RowsAtOnce(self._read_between_gaps(together, counts, lanes))
        else:
            lazy = self._read_lazily(together)
        if self._ahead is not None:
            lanes[0].lane.counts.update(self._ahead.take_counts())
        self._hand_out(lazy, pieces.bounds(len(lanes)), lanes, in_turn=in_step)

    def _read_lazily(self, rows: Rows) -> LazyRows:
        with _uncollected():
            return self._reader.read_lazily(rows)

    def _hand_out(
        self,
        lazy: LazyRows,
        bounds: Sequence[Sequence[tuple[int, int]]],
        lanes: Sequence[RowsOfLane],
        *,
        in_turn: bool,
    ) -> None:
        """Append the samples of a block to those of its lanes.

        Args:
            lazy: The samples.
            bounds: For each lane, where its pieces of the block start and stop.
            lanes: The lanes.
            in_turn: Whether they will take the pieces in order.
        """
        # Keeping samples that are already built until the block ends would evict them from the
        # CPU cache.
        shared = in_turn and not isinstance(lazy, ReleasedRows)
        block = SharedBlock(lazy, max(each[-1][1] for each in bounds if each)) if shared else None
        for lane, pieces in zip(lanes, bounds, strict=True):
            if block is None:
                lane.pending += [
                    ReadSamples(*each, iter(()), own=lazy.between(*each)) for each in pieces
                ]
            elif pieces:
                following = iter(pieces)
                lane.pending.append(ReadSamples(*next(following), following, block))
            lane.stop += sum([stop - start for start, stop in pieces])

    def _read_between_gaps(
        self, rows: Rows, counts: Sequence[int], lanes: Sequence[RowsOfLane]
    ) -> list[Any]:
        """Return the samples of `rows`, with `GAP` where the dataset has been removed."""
        for lane, count in zip(lanes, counts, strict=True):
            again = np.arange(lane.stop, min(lane.stop + count, lane.lane.reading.known))
            # Rows below `known` were read before the restore, and stages that hold samples back
            # need them again: `at` raises if their dataset is gone.
            lane.plan.at(lane.lane.number, again)
        samples: list[Any] = [GAP] * len(rows.leaf)
        there = np.flatnonzero(rows.leaf >= 0)
        for place, sample in zip(there.tolist(), self._reader.read(rows.pick(there)), strict=True):
            samples[place] = sample
        return samples

    def _plan(self, lanes: Sequence[RowsOfLane], shares: Sequence[int]) -> None:
        """Plan the next rows of all lanes at once, at least those about to be read."""
        ahead = min(MAX_PLANNED_ROWS, 8 * self._next_block)
        if len(lanes) > 1:
            # The same number of batches for each lane, so that all run out at the same time.
            turn = max(1, ceil(self._turn_rows))
            ahead = min(MAX_PLANNED_ROWS // len(lanes), max(4 * turn, ahead // len(lanes)))
            if 2 * sum(shares) > MAX_PLANNED_ROWS:
                ahead = 0
            else:  # enough for the next read too; otherwise half of the planning would be wasted
                ahead = max(2 * max(shares), ahead // turn * turn)
        requests = [
            (lane.lane.number, lane.stop, max(share, ahead))
            for lane, share in zip(lanes, shares, strict=True)
        ]
        plan = lanes[0].plan
        planned = plan_together(plan, requests) if len(requests) > 1 else [plan.rows(*requests[0])]
        for lane, rows, (*_, count) in zip(lanes, planned, requests, strict=True):
            lane.set_planned(rows, requested=count)

    def _in_order(self, first: RowsOfLane) -> list[RowsOfLane]:
        """Return the lanes in the order of their next batches."""
        if len(self._lanes) == 1:
            return [first]
        others = [
            (lane.num_batches, number, lane)
            for number, lane in self._lanes.items()
            if lane is not first
        ]
        return [first, *(lane for *_, lane in sorted(others))]

    def _share(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> BlockPieces:
        """Divide `count` rows among the lanes, in the order in which batches will need them.

        Rows that were read but not yet taken count as well; the first lane always gets a row.
        """
        if len(lanes) == 1:
            return BlockPieces.of([(0, count)])
        turn = max(requested, ceil(self._rows_of_turn(lanes)))
        missing = [turn - (lane.stop - lane.row) for lane in lanes]
        missing[0] = max(requested, turn - lanes[0].used_of_turn)
        room = count - sum(lane.stop - lane.row for lane in lanes)
        pieces = [(0, min(missing[0], max(room, min(requested, count))))]
        room -= pieces[0][1]
        missing[0] -= pieces[0][1]
        places = [place for place, lane in enumerate(lanes) if not lane.is_exhausted]
        while room > 0 and any(missing[place] != turn for place in places):
            for place in places:
                share = max(0, min(missing[place], room))
                pieces.append((place, share))
                missing[place] -= share - turn
                room -= share
        # From here on, all lanes take as much in turn.
        return BlockPieces.of(pieces).followed_by(places, turn, max(0, room))

    def _rows_of_turn(self, lanes: Sequence[RowsOfLane]) -> float:
        """Return how many rows recent batches have used, on average."""
        # Every lane except the first is between two batches.
        (new, used), *others = [lane.count_used() for lane in lanes]
        batches, rows = map(sum, zip(*others, strict=True))
        if batches > 0:
            self._turn_rows = rows / batches
        lanes[0].used_of_turn = max(0, round(used - new * self._turn_rows))
        return self._turn_rows


def blocks_of(rows: RowsOfLane, stage: object, reader: Reader) -> BlocksOfLanes:
    """Return the object that reads for a lane, shared by lanes of a worker with the same slices.

    Args:
        rows: The rows of the lane.
        stage: The stage that reads.
        reader: The reader of the stage.
    """
    lane, plan = rows.lane, rows.lane.reading.plan
    if not isinstance(plan, DealtPlan):
        blocks = BlocksOfLanes(reader, 1)
    else:
        # Keyed by identity, since a stage may hold values that are not hashable. Its lanes keep
        # the stage alive, so no other stage can get the same id.
        blocks = lane.host.shared.setdefault(
            (id(stage), plan.stream_of(lane.number)), BlocksOfLanes(reader, plan.lanes_of_stream)
        )
    blocks.add(rows)
    return blocks


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause garbage collection while thousands of dicts are created.

    None of them is garbage, and traversing them would take a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
