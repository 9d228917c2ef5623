"""Read the next rows of several lanes in common blocks.

Lanes whose plan draws from the same slices are read together where one worker hosts several
of them: a block then holds the next batches of all, in the order in which they are delivered.
So it is not larger for many lanes than for one, and takes as few reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from energon.arrays import Ints
from energon.plan.balance import BalancedPlan
from energon.plan.dealt import DealtPlan, plan_together
from energon.plan.rows import Rows
from energon.stages.reading.block_reading import (
    BlocksOfLane,
    PlannedRows,
    ReadSamples,
    RowsOfLane,
    SharedBlock,
)
from energon.stages.reading.blocks import MAX_PLANNED_ROWS, LazyRows, Reader, ReleasedRows


class BlockPieces(NamedTuple):
    """How a block is divided among the lanes that are read together; two arrays of equal length.

    One after another, each piece is what a lane needs for its next batch.
    """

    place: Ints
    """The position in the list of lanes of the lane that a piece belongs to."""
    number: Ints
    """Number of rows of each piece."""

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int]]) -> BlockPieces:
        """Return the pieces of some pairs, without empty ones."""
        place, number = np.array([*pieces, (0, 0)], np.int64).T
        return cls(place[number > 0], number[number > 0])

    def followed_by(self, places: Sequence[int], turn: int, room: int) -> BlockPieces:
        """Return these pieces, and then a turn of each lane again and again until `room` is full.

        Args:
            places: The lanes that have rows left.
            turn: Rows of a turn.
            room: Rows to be shared; the last turn may be shorter.
        """
        turns = -(-room // turn) if places else 0
        number = np.full(turns, turn)
        number[-1:] -= turns * turn - room
        turns_of = np.resize(np.array(places, np.int64), turns)
        place = np.concatenate([self.place, turns_of])
        return BlockPieces(place, np.concatenate([self.number, number]))

    @property
    def are_even(self) -> bool:
        """Whether all pieces but the first and last have the same size."""
        between = self.number[1:-1]
        return bool((between == between[:1]).all())

    def by_lane(self, lanes: int) -> list[int]:
        """Return the number of rows of each lane."""
        counts: list[int] = np.bincount(self.place, self.number, lanes).astype(np.int64).tolist()
        return counts

    def cut(self, counts: Sequence[int]) -> BlockPieces:
        """Return these pieces, shortened to `counts`: the rows that lanes have left."""
        left, found = list(counts), []
        for place, number in zip(self.place.tolist(), self.number.tolist(), strict=True):
            found.append((place, min(number, left[place])))
            left[place] -= found[-1][1]
        return BlockPieces.of(found)

    def in_order(self, rows: Sequence[Rows]) -> Rows:
        """Return the rows of all lanes in the order of the pieces.

        Samples are then used in their order in memory.
        """
        if len(self.place) == 1:
            return rows[int(self.place[0])]
        by_lane, ends = self._by_lane, np.cumsum(self.number)
        begins = np.empty_like(ends)
        begins[by_lane] = np.cumsum(self.number[by_lane]) - self.number[by_lane]
        order = np.arange(ends[-1]) + np.repeat(begins - (ends - self.number), self.number)
        return Rows(*(np.concatenate(columns)[order] for columns in zip(*rows, strict=True)))

    def bounds(self, lanes: int) -> list[list[tuple[int, int]]]:
        """Return for each lane the indices in the block at which its pieces start and stop."""
        by_lane, stops = self._by_lane, np.cumsum(self.number)
        pairs = zip((stops - self.number)[by_lane].tolist(), stops[by_lane].tolist(), strict=True)
        return [
            list(islice(pairs, number))
            for number in np.bincount(self.place, minlength=lanes).tolist()
        ]

    @property
    def _by_lane(self) -> Ints:
        """The numbers of the pieces, those of the first lane first."""
        return np.argsort(self.place, kind="stable")


class BlocksOfLanes(BlocksOfLane):
    """Reads blocks for the lanes of a stream that one worker hosts.

    Args:
        reader: Reads samples.
        lanes_of_stream: How many lanes read the same slices, over all workers.
    """

    def __init__(self, reader: Reader, lanes_of_stream: int) -> None:
        super().__init__(reader, lanes_of_stream)
        # Lanes keep this object alive, not the reverse, so it is freed with the last of them.
        self._lanes: WeakValueDictionary[int, RowsOfLane] = WeakValueDictionary()
        self._turn_rows = 0.0
        # Those of several lanes that take turns, and the numbers of these.
        self._joint, self._joint_lanes = PlannedRows(), list[int]()

    @classmethod
    def of(
        cls, rows: RowsOfLane, stage: object, reader: Reader, plan: DealtPlan | BalancedPlan
    ) -> BlocksOfLanes:
        """Return the object that reads for a lane, shared by lanes with the same slices.

        Args:
            rows: The rows of the lane.
            stage: The stage that reads.
            reader: The reader of the stage.
            plan: The plan of the lane.
        """
        # Keyed by identity, since a stage may hold values that are not hashable. Its lanes keep
        # the stage alive, so no other stage can get the same id.
        lane = rows.lane
        blocks: BlocksOfLanes = lane.host.shared.setdefault(
            (id(stage), plan.stream_of(lane.number)), cls(reader, plan.lanes_of_stream)
        )
        blocks._lanes[lane.number] = rows
        return blocks

    def _read_block(self, first: RowsOfLane, count: int, requested: int) -> None:
        # Another lane may have taken its place, or it has moved to another row.
        self._lanes[first.lane.number] = first
        lanes = [rows for held in self._lanes.valuerefs() if (rows := held()) is not None]
        if len(lanes) == 1:
            super()._read_block(first, count, requested)
        elif not self._read_in_turn(first, lanes, count, requested):
            self._read_shares(_by_next_batch(first, lanes), count, requested)

    def _read_in_turn(
        self, first: RowsOfLane, lanes: list[RowsOfLane], count: int, requested: int
    ) -> bool:
        """Read the next rows of all lanes as those of one, if they are their next batches in turn.

        They are planned like those of a single lane, and neither divided nor put together.

        Returns:
            Whether they are; if not, nothing is read.
        """
        plan = first.plan
        if not self._has_begun or self._ahead is not None or not isinstance(plan, DealtPlan):
            return False
        lanes.sort(key=lambda lane: lane.lane.number)
        stops, place = [lane.stop for lane in lanes], lanes.index(first)
        row = plan.deal.row_in_turn(stops, place)
        if row is None or stops != [lane.row for lane in lanes]:
            return False
        stripe, used = plan.deal.stripe, row % plan.deal.stripe
        if requested > stripe - used:
            return False
        numbers = [lane.lane.number for lane in lanes]
        if self._joint.stop != row or self._joint_lanes != numbers:
            self._joint, self._joint_lanes = PlannedRows(row), numbers
        if not self._joint.has_planned(count):
            ahead = max(count, self._rows_ahead)
            self._joint.set_planned(plan.rows_in_turn(numbers, row, ahead), requested=ahead)
        rows = self._joint.next_rows(count)
        if (rows.leaf < 0).any():
            return False
        size = len(rows.leaf)
        self._joint.stop += size
        pieces: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for batch, start in enumerate(range(-used, size, stripe), place):
            pieces[batch % len(lanes)].append((max(0, start), min(start + stripe, size)))
        if size:
            shares = [(lanes[number], own) for number, own in pieces.items()]
            self._hand_out(self._read_lazily(rows, (), ()), size, shares, in_turn=True)
        return True

    def _read_shares(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> None:
        """Read the next rows of each lane."""
        pieces = self._share(lanes, count, requested)
        shares = pieces.by_lane(len(lanes))
        rows = self._next_rows(lanes, shares)
        counts = [len(each.leaf) for each in rows]
        if not sum(counts):
            return
        if counts != shares:
            pieces = pieces.cut(counts)
        # Lanes that use different numbers of rows soon take turns in another order than planned.
        in_step = pieces.are_even
        if not in_step:
            pieces = BlockPieces.of(enumerate(counts))
        lazy = self._read_lazily(pieces.in_order(rows), lanes, counts)
        bounds = zip(lanes, pieces.bounds(len(lanes)), strict=True)
        self._hand_out(lazy, sum(counts), bounds, in_turn=in_step)

    def _hand_out(
        self,
        lazy: LazyRows,
        size: int,
        shares: Iterable[tuple[RowsOfLane, Sequence[tuple[int, int]]]],
        *,
        in_turn: bool,
    ) -> None:
        """Append the samples of a block to those of its lanes.

        Args:
            lazy: The samples.
            size: Number of samples.
            shares: Lanes, each with where its pieces of the block start and stop.
            in_turn: Whether they will take the pieces in order.
        """
        # Keeping samples that are already built until the block ends would evict them from the
        # CPU cache.
        is_shared = in_turn and not isinstance(lazy, ReleasedRows)
        block = SharedBlock(lazy, size) if is_shared else None
        for lane, pieces in shares:
            if block is None:
                lane.pending += [ReadSamples(*each, lazy.between(*each)) for each in pieces]
            elif pieces:
                following = iter(pieces)
                lane.pending.append(ReadSamples(*next(following), None, block, following))
            lane.stop += sum([stop - start for start, stop in pieces])

    def _plan(self, lanes: Sequence[RowsOfLane], shares: Sequence[int]) -> None:
        """Plan the next rows of all lanes at once, at least those about to be read."""
        if len(lanes) == 1:
            super()._plan(lanes, shares)
            return
        # The same number of batches for each lane, so that all run out at the same time.
        turn = max(1, ceil(self._turn_rows))
        ahead = min(MAX_PLANNED_ROWS // len(lanes), max(4 * turn, self._rows_ahead // len(lanes)))
        if 2 * sum(shares) > MAX_PLANNED_ROWS:
            ahead = 0
        else:  # enough for the next read too; otherwise half of the planning would be wasted
            ahead = max(2 * max(shares), ahead // turn * turn)
        requests = [
            (lane.lane.number, lane.stop, max(share, ahead))
            for lane, share in zip(lanes, shares, strict=True)
        ]
        planned = plan_together(lanes[0].plan, requests)
        for lane, rows, (*_, count) in zip(lanes, planned, requests, strict=True):
            lane.set_planned(rows, requested=count)

    def _share(self, lanes: Sequence[RowsOfLane], count: int, requested: int) -> BlockPieces:
        """Divide `count` rows among the lanes, in the order in which batches will need them.

        Rows that were read but not yet taken count as well; the first lane always gets a row.
        """
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


def _by_next_batch(first: RowsOfLane, lanes: Iterable[RowsOfLane]) -> list[RowsOfLane]:
    """Return lanes in the order of their next batches, of which that of `first` comes first."""
    others = [lane for lane in lanes if lane is not first]
    return [first, *sorted(others, key=lambda lane: (lane.num_batches, lane.lane.number))]
