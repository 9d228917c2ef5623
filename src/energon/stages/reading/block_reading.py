"""Read the next rows of a lane in blocks.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from energon.plan.rows import Plan, Rows
from energon.stages.lane import Lane
from energon.stages.reading.blocks import (
    MAX_BLOCK_BYTES,
    MAX_PLANNED_ROWS,
    MIN_PLANNED_ROWS,
    NO_ROWS,
    LazyRows,
    NextRows,
    ReadAhead,
    Reader,
    RowsAtOnce,
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
        chosen = slice(start, None if count is None else start + count)
        leaf, epoch, ordinal = self._planned
        return Rows(leaf[chosen], epoch[chosen], ordinal[chosen])


class SharedBlock:
    """One iterator over the samples of a block, shared by lanes that take from it in turn.

    Args:
        lazy: The samples.
        stop: Number of samples.
    """

    __slots__ = ("lazy", "row", "samples")

    def __init__(self, lazy: LazyRows, stop: int) -> None:
        self.lazy = lazy
        self.samples = lazy.between(0, stop)
        self.row = 0


@dataclass(slots=True, eq=False)
class ReadSamples:
    """The samples of a block that belong to one lane, built when they are taken.

    Args:
        start: Index in the block of the next one.
        stop: Index after the last one of the same piece.
        own: The lane's own iterator; None until it leaves the shared one.
        block: The iterator that all lanes of the block share; None if the lane has its own.
        pieces: The pieces that follow: the first index of each, and the one after its last.
    """

    start: int
    stop: int
    own: Iterator[Any] | None = None
    block: SharedBlock | None = None
    pieces: Iterator[tuple[int, int]] | None = None

    def move_on(self) -> bool:
        """Continue with the next piece; return False if there is none."""
        piece = None if self.pieces is None else next(self.pieces, None)
        if piece is None:
            return False
        self.start, self.stop = piece
        self.own = None
        return True


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


class BlocksOfLane:
    """Reads blocks for one lane.

    Args:
        reader: Reads samples.
        lanes_of_stream: How many lanes read the same slices, over all workers.
    """

    def __init__(self, reader: Reader, lanes_of_stream: int = 1) -> None:
        self._reader = reader
        self._lanes_of_stream = lanes_of_stream
        self._max_block = max(
            1,
            min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, self._reader.mean_sample_bytes))),
        )
        self._next_block = 1
        self._ahead: ReadAhead | None = None
        self._has_begun = False

    def read(self, first: RowsOfLane, requested: int) -> None:
        """Read the next rows, at least one, unless the lane has ended."""
        count = min(self._max_block, max(requested, self._next_block))
        self._next_block = min(self._max_block, 2 * count)
        self._read_block(first, count, requested)

    def _read_block(self, lane: RowsOfLane, count: int, requested: int) -> None:
        """Read the next `count` rows."""
        (rows,) = self._next_rows([lane], [count])
        size = len(rows.leaf)
        if size:
            lazy = self._read_lazily(rows, [lane], [size])
            lane.pending.append(ReadSamples(0, size, lazy.between(0, size)))
            lane.stop += size

    def _next_rows(self, lanes: Sequence[RowsOfLane], shares: Sequence[int]) -> list[Rows]:
        """Return the next rows of each lane, planned if they are not yet."""
        blocks = 1 if self._ahead is None else self._ahead.planned_blocks
        if not all(lane.has_planned(blocks * n) for lane, n in zip(lanes, shares, strict=True)):
            self._plan(lanes, [blocks * share for share in shares])
        return [lane.next_rows(share) for lane, share in zip(lanes, shares, strict=True)]

    @property
    def _rows_ahead(self) -> int:
        """How many rows to plan at once, for some blocks."""
        return min(MAX_PLANNED_ROWS, max(MIN_PLANNED_ROWS, 8 * self._next_block))

    def _plan(self, lanes: Sequence[RowsOfLane], shares: Sequence[int]) -> None:
        """Plan the next rows, at least those about to be read."""
        (lane,), (share,) = lanes, shares
        count = max(share, self._rows_ahead)
        lane.set_planned(lane.plan.rows(lane.lane.number, lane.stop, count), requested=count)

    def _read_lazily(
        self, rows: Rows, lanes: Sequence[RowsOfLane], counts: Sequence[int]
    ) -> LazyRows:
        """Return the samples of rows, and prepare those that follow; `counts` has each lane's."""
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
        with _uncollected():
            if (rows.leaf < 0).any():
                lazy: LazyRows = RowsAtOnce(self._read_between_gaps(rows, lanes, counts))
            else:
                lazy = self._reader.read_lazily(rows)
        if self._ahead is not None:
            lanes[0].lane.counts.update(self._ahead.take_counts())
        return lazy

    def _read_between_gaps(
        self, rows: Rows, lanes: Sequence[RowsOfLane], counts: Sequence[int]
    ) -> list[Any]:
        """Return the samples of `rows`, with `GAP` where the dataset has been removed."""
        for lane, count in zip(lanes, counts, strict=True):
            lane.has_gaps = True
            again = np.arange(lane.stop, min(lane.stop + count, lane.lane.reading.known))
            # Rows below `known` were read before the restore, and stages that hold samples back
            # need them again: `at` raises if their dataset is gone.
            lane.plan.at(lane.lane.number, again)
        samples: list[Any] = [GAP] * len(rows.leaf)
        there = np.flatnonzero(rows.leaf >= 0)
        for place, sample in zip(there.tolist(), self._reader.read(rows.pick(there)), strict=True):
            samples[place] = sample
        return samples


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
