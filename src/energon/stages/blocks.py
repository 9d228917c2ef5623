"""Read the next rows of lanes in blocks.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes.

Lanes whose plan draws from the same slices are read together where one worker hosts several
of them: a block then holds the next batches of all, in the order in which they are delivered.
So it is not larger for many lanes than for one, and takes as few reads.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import ceil
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from energon.plan.dealt import plan_together
from energon.plan.rows import Plan, Rows
from energon.samples.crude import record_sources
from energon.stages.lane import Lane

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, small enough for hundreds of lanes."""


T = TypeVar("T")
LaneShare = tuple[int, int]
"""The position of a lane in a list of lanes, and how many of its next rows to read."""

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
        """Return a prefetcher for this worker; None if nothing needs to be fetched ahead.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
        """


class LazyRows(Protocol):
    """Samples whose bytes are in memory, and which are built only when they are taken.

    Building and releasing samples batch by batch takes two thirds of the time of building
    thousands at once, which would evict one another from the CPU cache.
    """

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`.

        The iterator may have a method `columns(count)` that returns the next `count` samples
        already collated, or None if fewer are left; it then also has a length hint. Rows of
        several datasets are collated together if each has the same `column_names`.
        """


class LazyLeafRows(LazyRows, Protocol):
    """Samples of one dataset."""

    def with_sources(self, dataset_path: str) -> LazyRows:
        """Return the same samples with their origin in `__sources__`."""


class ReleasedRows:
    """Base of samples that iterators release as they pass them on.

    The next batch then reuses the memory of the last. Nothing else may keep them until then.
    """


@dataclass(frozen=True)
class RowsAtOnce(ReleasedRows):
    """Samples that are already built."""

    samples: list[Any]

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`."""
        return released(self.samples[start:stop])

    def with_sources(self, dataset_path: str) -> RowsAtOnce:
        """Store the origin of each sample in it."""
        record_sources(dataset_path, self.samples)
        return self


def released(items: list[T]) -> Iterator[T]:
    """Yield items, each of which is taken out of the list first."""
    items.reverse()
    return map(list.pop, repeat(items, len(items)))


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
    """Consecutive samples of a block that belong to one lane, built when they are taken.

    Args:
        start: Index in the block of the next one.
        stop: Index after the last one.
        block: The iterator that all lanes of the block share; None if the lane has its own.
        own: The lane's own iterator; None until it leaves the shared one.
    """

    start: int
    stop: int
    block: SharedBlock | None
    own: Iterator[Any] | None = None


class NextRows(NamedTuple):
    """The rows that a lane reads next."""

    lane: int
    rows: PlanRows
    start: int
    number: int
    """Number of rows."""


class ReadAhead(Protocol):
    """Prefetches the samples of lanes that are read together."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""


GAP = object()
"""Stands for a sample whose dataset has been removed from the blend."""
_NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


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
        used_of_turn: Rows already used for the current batch when `note` was called.
    """

    def __init__(self, lane: Lane, plan: Callable[[int], Plan]) -> None:
        self.lane = lane
        self.row = self.stop = 0
        self.pending: deque[ReadSamples] = deque()
        self.has_gaps = False
        self.used_of_turn = 0
        self._noted_row = 0
        self._noted_batch = self.num_batches
        self._make_plan = plan
        self._plan: Plan | None = None
        self._planned = _NO_ROWS
        self._planned_start = 0
        self._ended = False

    def go_to(self, row: int) -> None:
        """Discard everything planned or read, and continue at `row`."""
        self.row = self.stop = self._planned_start = self._noted_row = row
        self.pending.clear()
        self._planned = _NO_ROWS

    @property
    def plan(self) -> Plan:
        """The order of the lane."""
        if self._plan is None:
            # Created late, because restoring a state may replace the plan.
            self._plan = self.lane.reading.plan or self._make_plan(self.lane.lanes)
        return self._plan

    @property
    def num_planned(self) -> int:
        """Number of planned rows that have not been read."""
        return self._planned_start + len(self._planned.leaf) - self.stop

    def set_planned(self, rows: Rows, *, requested: int) -> None:
        """Set the planned rows that start at `stop`; fewer than `requested` end the lane."""
        self._planned, self._planned_start = rows, self.stop
        self._ended = len(rows.leaf) < requested

    def has_planned(self, count: int) -> bool:
        """Return whether the next `count` rows are planned, or all that exist."""
        return self._ended or count <= self.num_planned

    @property
    def is_exhausted(self) -> bool:
        """Whether all rows of the lane have been read."""
        return self._ended and not self.num_planned

    def next_rows(self, count: int) -> Rows:
        """Return the next planned rows, at most `count`."""
        start = self.stop - self._planned_start
        return self._planned.pick(slice(start, start + count))

    @property
    def num_batches(self) -> int:
        """Number of batches that the lane has yielded."""
        return self.lane.current.batch or 0

    @property
    def new_batches(self) -> int:
        """Number of batches since the last `note`."""
        return self.num_batches - self._noted_batch

    @property
    def used_rows(self) -> int:
        """Rows used since the last `note`, including those of the current batch."""
        return self.row - self._noted_row + self.used_of_turn

    def note(self, used_of_turn: int) -> None:
        """Record the position, and how many rows the current batch has used so far."""
        self.used_of_turn = used_of_turn
        self._noted_row, self._noted_batch = self.row, self.num_batches

    def extend(self, run: ReadSamples, *, gaps: bool) -> None:
        """Append samples that were read."""
        self.pending.append(run)
        self.stop += run.stop - run.start
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
        shares = [0] * len(lanes)
        for place, number in pieces:
            shares[place] += number
        if not all(lane.has_planned(n) for lane, n in zip(lanes, shares, strict=True)):
            self._plan(lanes, shares)
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
                    )
                    for lane, number in zip(lanes, counts, strict=True)
                ]
            )
        pieces = _of_counts(pieces, counts)
        # Lanes that use different numbers of rows soon take turns in another order than planned.
        in_step = len({number for _, number in pieces[1:-1]}) < 2
        if not in_step:
            pieces = [(place, number) for place, number in enumerate(counts) if number]
        together = _together(rows, pieces)
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
        start = 0
        for place, number in pieces:
            stop = start + number
            own = lazy.between(start, stop) if block is None else None
            lanes[place].extend(ReadSamples(start, stop, block=block, own=own), gaps=gaps)
            start = stop

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
        others = [lane for lane in self._lanes.values() if lane is not first]
        others.sort(key=lambda each: (each.num_batches, each.lane.number))
        return [first, *others]

    def _share(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> list[LaneShare]:
        """Divide `count` rows among the lanes, in the order in which batches will need them.

        Rows that were read but not yet taken count as well; the first lane always gets a row.
        """
        if len(lanes) == 1:
            return [(0, count)]
        turn = max(requested, ceil(self._rows_of_turn(lanes)))
        missing = [turn - (lane.stop - lane.row) for lane in lanes]
        missing[0] = max(requested, turn - lanes[0].used_of_turn)
        room = count - sum(lane.stop - lane.row for lane in lanes)
        pieces = [(0, min(missing[0], max(room, min(requested, count))))]
        room -= pieces[0][1]
        missing[0] -= pieces[0][1]
        places = [place for place, lane in enumerate(lanes) if not lane.is_exhausted]
        while room > 0 and places:
            for place in places:
                share = max(0, min(missing[place], room))
                if share:
                    pieces.append((place, share))
                missing[place] -= share - turn
                room -= share
        return pieces

    def _rows_of_turn(self, lanes: Sequence[RowsOfLane]) -> float:
        """Return how many rows recent batches have used, on average."""
        # Every lane except the first is between two batches.
        first, *others = lanes
        batches = sum(lane.new_batches for lane in others)
        if batches > 0:
            self._turn_rows = sum(lane.used_rows for lane in others) / batches
        for lane in others:
            lane.note(0)
        first.note(max(0, round(first.used_rows - first.new_batches * self._turn_rows)))
        return self._turn_rows


def _of_counts(pieces: Sequence[LaneShare], counts: Sequence[int]) -> list[LaneShare]:
    """Return `pieces` shortened to `counts`, the rows that lanes really have left."""
    left, found = list(counts), []
    for place, number in pieces:
        there = min(number, left[place])
        left[place] -= there
        if there:
            found.append((place, there))
    return found


def _together(rows: Sequence[Rows], pieces: Sequence[LaneShare]) -> Rows:
    """Return the rows of all lanes in the order of the pieces.

    Samples are then used in their order in memory.
    """
    if len(pieces) == 1:
        return rows[pieces[0][0]]
    starts = np.cumsum([0, *(len(each.leaf) for each in rows)]).tolist()
    begins = []
    for place, number in pieces:
        begins.append(starts[place])
        starts[place] += number
    counts = np.array([number for _, number in pieces])
    ends = np.cumsum(counts)
    order = np.arange(ends[-1]) + np.repeat(np.array(begins) - (ends - counts), counts)
    return Rows(*(np.concatenate(columns)[order] for columns in zip(*rows, strict=True)))


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
