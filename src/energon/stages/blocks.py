"""Read the next rows of lanes in blocks.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes.

Lanes whose plan draws from the same slices are read together where one worker hosts several
of them: a block then holds the next batches of all, in the order in which they are delivered.
So it is not larger for many lanes than for one, and takes as few reads.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np

from energon.plan.dealt import plan_together
from energon.plan.rows import Plan, Rows
from energon.stages.block_pieces import BlockPieces
from energon.stages.lane import Lane
from energon.stages.lazy_rows import LazyRows, ReleasedRows, RowsAtOnce

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, small enough for hundreds of lanes."""
PlanRows = Callable[[int, int], Rows]
"""Return the rows of a lane: `rows(start, count)`."""


class Reader(Protocol):
    """Yields the samples of rows; shared by all lanes of a worker."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def read(self, rows: Rows) -> list[Any]:
        """Return the samples of `rows`, in that order."""

    def read_lazily(self, rows: Rows) -> LazyRows:
        """Return the samples of `rows`, built only when they are taken where that is possible."""

    def read_ahead(self, lanes_of_stream: int) -> ReadAhead | None:
        """Return what prepares samples in this worker; None if nothing needs to be prepared.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
        """


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
        pieces: The pieces that follow: the first index of each, and the one after its last.
        block: The iterator that all lanes of the block share; None if the lane has its own.
        own: The lane's own iterator; None until it leaves the shared one.
    """

    start: int
    stop: int
    pieces: Iterator[tuple[int, int]]
    block: SharedBlock | None = None
    own: Iterator[Any] | None = None

    def move_on(self) -> bool:
        """Continue with the next piece; return False if there is none."""
        piece = next(self.pieces, None)
        if piece is None:
            return False
        self.start, self.stop = piece
        self.own = None
        return True


NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class NextRows(NamedTuple):
    """The rows that a lane reads next."""

    lane: int
    rows: PlanRows
    start: int
    number: int
    """Number of rows."""
    planned: Rows = NO_ROWS
    """Those that are already planned: the first of them, and perhaps more."""


class ReadAhead(Protocol):
    """Prepares the samples of lanes that are read together."""

    @property
    def planned_blocks(self) -> int:
        """How many blocks of rows should be planned for `move_to`, with the one that is read."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""


GAP = object()
"""Stands for a sample whose dataset has been removed from the blend."""


class RowsOfLane:
    """The next rows of a lane: those that are planned, and those that are read but not yet taken.

    Args:
        lane: The lane.
        plan: Returns the plan for a number of lanes; used if the lane has no plan of its own.

    Attributes:
        row: The next row to be taken.
        stop: The row after the last one that was read.
        pending: The samples that were read.
        has_gaps: Whether some of them come from datasets that have been removed.
        used_of_turn: Rows already used for the current batch when `count_used` was called.
    """

    def __init__(self, lane: Lane, plan: Callable[[int], Plan]) -> None:
        self.lane = lane
        self.row = self.stop = 0
        self.pending: list[ReadSamples] = []
        self.has_gaps = False
        self.used_of_turn = 0
        self._noted_row = 0
        self._noted_batch = self.num_batches
        self._make_plan = plan
        self._plan: Plan | None = None
        self._planned = NO_ROWS
        self._planned_start = 0
        self._ended = False

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

    def set_planned(self, rows: Rows, *, requested: int) -> None:
        """Set the planned rows that start at `stop`; fewer than `requested` end the lane."""
        self._planned, self._planned_start = rows, self.stop
        self._ended = len(rows.leaf) < requested

    def has_planned(self, count: int) -> bool:
        """Return whether the next `count` rows are planned, or all that exist."""
        return self._ended or self.stop + count <= self._planned_start + len(self._planned.leaf)

    @property
    def is_exhausted(self) -> bool:
        """Whether all rows of the lane have been read."""
        return self._ended and self.stop == self._planned_start + len(self._planned.leaf)

    def next_rows(self, count: int | None = None) -> Rows:
        """Return the next planned rows, at most `count`; None for all."""
        start = self.stop - self._planned_start
        return self._planned.pick(slice(start, None if count is None else start + count))

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

    def extend(self, runs: Iterable[ReadSamples], count: int, *, gaps: bool) -> None:
        """Append the samples of the next `count` rows."""
        self.pending.extend(runs)
        self.stop += count
        self.has_gaps |= gaps


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
                        lane.lane.number,
                        partial(lane.plan.rows, lane.lane.number),
                        lane.stop,
                        number,
                        lane.next_rows(),
                    )
                    for lane, number in zip(lanes, counts, strict=True)
                ]
            )
        if counts != shares:
            pieces = pieces.cut(counts)
        # Lanes that use different numbers of rows soon take turns in another order than planned.
        in_step = pieces.are_even
        if not in_step:
            pieces = BlockPieces.of(enumerate(counts))
        together = pieces.in_order(rows)
        gaps = bool((together.leaf < 0).any())
        with _uncollected():
            lazy: LazyRows = (
                RowsAtOnce(self._read_between_gaps(together, counts, lanes))
                if gaps
                else self._reader.read_lazily(together)
            )
        if self._ahead is not None:
            first.lane.counts.update(self._ahead.take_counts())
        # Keeping samples that are already built until the block ends would evict them from the
        # CPU cache.
        shared = in_step and not isinstance(lazy, ReleasedRows)
        block = SharedBlock(lazy, len(together.leaf)) if shared else None
        for lane, number, bounds in zip(lanes, counts, pieces.bounds(len(lanes)), strict=True):
            if block is None:
                runs = [ReadSamples(*each, iter(()), own=lazy.between(*each)) for each in bounds]
            else:
                pieces_left = iter(bounds)
                runs = [ReadSamples(*each, pieces_left, block) for each in islice(pieces_left, 1)]
            lane.extend(runs, number, gaps=gaps)

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
    together = 1 if plan is None else plan.lanes_of_stream
    if together == 1:
        blocks = BlocksOfLanes(reader, 1)
    else:
        stream = lane.number % (lane.lanes // together)
        # Keyed by identity, since a stage may hold values that are not hashable. Its lanes keep
        # the stage alive, so no other stage can get the same id.
        blocks = lane.host.shared.setdefault((id(stage), stream), BlocksOfLanes(reader, together))
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
