"""Read the samples of a lane in the order of its plan.

The position is one number, the row of the next sample, and reading can start at any.

A run may be restored with another mix. Rows that were already read keep their order, since stages
that hold items back read them again; the new mix begins with the first row of a stream that none
of its lanes has read. From then on, that row is part of their states.

Rows are planned and samples are read in blocks, which grow from a single batch at the start
(so that the first one comes at once) to what a good read takes. Lanes that draw from the same
slices and are hosted by one worker are read together: a block then has the next batches of each.
So it is not larger for many lanes than for one, and takes as few reads.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from energon.errors import ConfigError, StateError
from energon.plan.balance import BalancedPlan
from energon.plan.dealt import DealtPlan, plan_together
from energon.plan.packs import PackedPlan, PackedRows
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan, Rows
from energon.samples.crude import RestoreKey, UnreadableSample, flat, key_of
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemState,
    State,
    StateKind,
    ThroughDataset,
    ThroughIterator,
    unpack,
)
from energon.stages.hooks.clock import HookSpan
from energon.stages.hooks.hook import SKIPPED, Hook, HookRunner
from energon.stages.lane import (
    MAX_BLOCK_BYTES,
    MAX_PLANNED_ROWS,
    MIN_PLANNED_ROWS,
    NO_ROWS,
    Block,
    BuiltBlock,
    Lane,
    NextRows,
    PlanRows,
    ReadAhead,
    Reader,
)

logger = logging.getLogger("energon")
_NOT_PASSED_ON = frozenset({type(SKIPPED), UnreadableSample})
"""The types of samples that the stage does not yield."""


def raise_unreadable(sample: UnreadableSample) -> None:
    """Raise the error of a sample that could not be read."""
    raise sample.error


@dataclass(slots=True, eq=False)
class BlockPart:
    """The samples of a block that belong to one lane and are not yet taken.

    Args:
        block: The block.
        start: Index in it of the next sample.
        stop: Index after the last one.
    """

    block: Block
    start: int
    stop: int


class LaneRows:
    """The next rows of a lane, as far as they are planned or read and not yet taken.

    Where the rows of a plan have gaps, those that exist are counted from `go_to` on.

    Args:
        lane: The lane.
        plan: Returns the plan for a number of lanes; used if the lane has no plan of its own.

    Attributes:
        row: The next row to be taken.
        stop: The row after the last one that was read.
        existing: The rows that exist, if the plan has gaps.
        parts: The samples that were read, none of which is empty.
    """

    def __init__(self, lane: Lane, plan: Callable[[int], Plan]) -> None:
        self.lane = lane
        self.row = self.stop = self._planned_start = 0
        self.parts: deque[BlockPart] = deque()
        self._planned = NO_ROWS
        self._ended = False
        self._make_plan = plan
        self._plan: Plan | None = None
        self.existing: PackedRows | None = None
        self._origin = 0

    def go_to(self, row: int) -> None:
        """Discard everything planned or read, and continue at `row` of the plan."""
        self._origin, self._plan = row, None
        if isinstance(self.plan, PackedPlan):
            row = 0
        self.row = self.stop = self._planned_start = row
        self.parts.clear()
        self._planned, self._ended = NO_ROWS, False

    @property
    def plan(self) -> Plan:
        """The order of the lane."""
        if self._plan is None:
            # Created late, because restoring a state may replace the plan.
            plan = self._plan = self.lane.reading.plan or self._make_plan(self.lane.lanes)
            if isinstance(plan, PackedPlan):
                self.existing = PackedRows(plan, self.lane.number, self._origin)
        return self._plan

    @property
    def plan_rows(self) -> PlanRows:
        """A function that returns the samples of some rows; it does not keep this object alive."""
        plan = self.plan
        return partial(plan.rows, self.lane.number) if self.existing is None else self.existing

    @property
    def next_number(self) -> int:
        """The row of the plan that is taken next."""
        numbers = self.numbers(self.row, 1)
        return numbers[0] if numbers else self.next_start

    @property
    def next_start(self) -> int:
        """A row of the plan from which on the next one is found."""
        return self.numbers(self.row - 1, 1)[0] + 1 if self.row else self._origin

    def numbers(self, start: int, count: int) -> Sequence[int]:
        """Return the rows of the plan that some rows are; fewer only at the end."""
        if self.existing is None:
            return range(start, start + count)
        numbers: list[int] = self.existing.numbers(start, count).tolist()
        return numbers

    def left_of_unit(self) -> int:
        """Return how many of the next rows are of the same unit."""
        number, size = self.next_number, self.lane.reading.unit_rows
        stop = number + size - number % size
        return stop - number if self.existing is None else self.existing.count(self.row, stop)

    def set_planned(self, rows: Rows, *, requested: int) -> None:
        """Set the planned rows that start at `stop`; fewer than `requested` are the last ones."""
        self._planned, self._planned_start = rows, self.stop
        self._ended = len(rows.leaf) < requested

    def has_planned(self, count: int) -> bool:
        """Return whether the next `count` rows are planned, or all that exist."""
        return self._ended or self.stop + count <= self._planned_start + len(self._planned.leaf)

    def next_rows(self, count: int | None = None) -> Rows:
        """Return the next planned rows, at most `count`; None for all."""
        start = self.stop - self._planned_start
        return self._planned.pick(slice(start, None if count is None else start + count))


class BlockReader:
    """Reads blocks for a lane, or for the lanes of a stream that one worker hosts.

    Args:
        reader: Reads samples.
        plan: The order of the lanes; None if each has one of its own.
    """

    def __init__(self, reader: Reader, plan: DealtPlan | BalancedPlan | None = None) -> None:
        self._reader = reader
        self._lanes_of_stream = 1 if plan is None else plan.lanes_of_stream
        self._mixed_rows = plan.window_rows if isinstance(plan, BalancedPlan) else 0
        self._max_block = max(
            1,
            min(MAX_PLANNED_ROWS, int(MAX_BLOCK_BYTES / max(1.0, self._reader.mean_sample_bytes))),
        )
        self._next_block = 1
        self._ahead: ReadAhead | None = None
        self._has_begun = False
        # Lanes keep this object alive, not the reverse, so it is freed with the last of them.
        self._lanes: WeakValueDictionary[int, LaneRows] = WeakValueDictionary()

    @classmethod
    def of(cls, rows: LaneRows, stage: object, reader: Reader, plan: Plan | None) -> BlockReader:
        """Return the object that reads for a lane, shared by lanes with the same slices.

        Args:
            rows: The rows of the lane.
            stage: The stage that reads.
            reader: The reader of the stage.
            plan: The plan of the lane, if it has one of its own.
        """
        if not isinstance(plan, DealtPlan | BalancedPlan):
            return cls(reader)
        # Keyed by identity, since a stage may hold values that are not hashable. Its lanes keep
        # the stage alive, so no other stage can get the same id.
        key = id(stage), plan.stream_of(rows.lane.number)
        blocks: BlockReader = rows.lane.host.shared.setdefault(key, cls(reader, plan))
        blocks._lanes[rows.lane.number] = rows
        return blocks

    def read(self, first: LaneRows, requested: int) -> None:
        """Read the next rows of a lane, at least one, unless it has ended.

        The other lanes get as many, without those that they have not taken yet. If there is no room
        for a batch of each, the lanes whose batches come first get one.

        Args:
            first: The lane, of which everything that was read is taken.
            requested: Rows that it needs now.
        """
        lanes = self._by_next_batch(first)
        count = min(self._max_block, max(requested, self._next_block))
        self._next_block = min(self._max_block, 2 * count)
        whole = count // requested
        if len(lanes) == 1:
            wanted = [count]
        elif whole >= len(lanes):
            wanted = [whole // len(lanes) * requested] * len(lanes)
        else:
            wanted = [requested] * whole + [0] * (len(lanes) - whole)
        shares = [
            max(0, rows - (lane.stop - lane.row)) for lane, rows in zip(lanes, wanted, strict=True)
        ]
        shares[0] = max(wanted[0], min(requested, count))
        rows = self._next_rows(lanes, shares)
        edges = [0, *accumulate(len(own.leaf) for own in rows)]
        if not edges[-1]:
            return
        block = self._read(rows, lanes)
        for lane, (start, stop) in zip(lanes, pairwise(edges), strict=True):
            if start < stop:
                lane.parts.append(BlockPart(block, start, stop))
                lane.stop += stop - start

    def _by_next_batch(self, first: LaneRows) -> list[LaneRows]:
        """Return the lanes in the order of their next batches, beginning with that of `first`."""
        if not self._lanes:
            return [first]
        # Another lane may have taken its place, or it has moved to another row.
        self._lanes[first.lane.number] = first
        others = [lane for lane in self._lanes.values() if lane is not first]
        others.sort(key=lambda lane: (lane.lane.current.batch or 0, lane.lane.number))
        return [first, *others]

    def _next_rows(self, lanes: Sequence[LaneRows], shares: Sequence[int]) -> list[Rows]:
        """Return the next rows of each lane, planned if they are not yet."""
        blocks = 1 if self._ahead is None else self._ahead.planned_blocks
        pairs = list(zip(lanes, shares, strict=True))
        if not all(lane.has_planned(blocks * share) for lane, share in pairs):
            self._plan(lanes, blocks * max(shares))
        return [lane.next_rows(share) for lane, share in pairs]

    def _plan(self, lanes: Sequence[LaneRows], share: int) -> None:
        """Plan the next rows of all lanes at once: at least `share` of each, for some blocks."""
        ahead = 0  # the plan keeps its windows, and deals a step only when it is asked for
        if not self._mixed_rows:
            ahead = min(MAX_PLANNED_ROWS, max(MIN_PLANNED_ROWS, 8 * self._next_block))
        # Planning a little more than is read now would be repeated with the next block.
        whole = ahead // len(lanes) // share * share
        requests = [(lane.lane.number, lane.stop, max(share, whole)) for lane in lanes]
        plan = lanes[0].plan
        if isinstance(plan, DealtPlan) and len(lanes) > 1:
            planned = plan_together(plan, requests)
        else:
            planned = [
                lane.plan_rows(start, count)
                for lane, (_, start, count) in zip(lanes, requests, strict=True)
            ]
        for lane, rows, (*_, count) in zip(lanes, planned, requests, strict=True):
            lane.set_planned(rows, requested=count)

    def _read(self, rows: Sequence[Rows], lanes: Sequence[LaneRows]) -> Block:
        """Return the samples of the next rows of lanes, and prepare those that follow."""
        if not self._has_begun:
            self._has_begun = True
            self._ahead = self._reader.read_ahead(self._lanes_of_stream, self._mixed_rows)
        if self._ahead is not None:
            self._ahead.move_to(
                [
                    NextRows(
                        lane.lane.number, lane.plan_rows, lane.stop, len(own.leaf), lane.next_rows()
                    )
                    for lane, own in zip(lanes, rows, strict=True)
                ]
            )
        together = rows[0]
        if len(rows) > 1:
            together = Rows(*map(np.concatenate, zip(*rows, strict=True)))
        with _uncollected():
            if (together.leaf < 0).any():
                block: Block = self._read_between_gaps(rows, together, lanes)
            else:
                block = self._reader.read(together)
        if self._ahead is not None:
            lanes[0].lane.counts.update(self._ahead.take_counts())
        return block

    def _read_between_gaps(
        self, rows: Sequence[Rows], together: Rows, lanes: Sequence[LaneRows]
    ) -> Block:
        """Return the samples of rows, with SKIPPED where the dataset has been removed."""
        for lane, own in zip(lanes, rows, strict=True):
            stop = min(lane.stop + len(own.leaf), lane.lane.reading.opened_at)
            # Rows below `known` were read before the restore, and stages that hold samples back
            # need them again: `at` raises if their dataset is gone.
            lane.plan.at(lane.lane.number, np.arange(lane.stop, stop))
        samples: list[Any] = [SKIPPED] * len(together.leaf)
        present = np.flatnonzero(together.leaf >= 0)
        block = self._reader.read(together.pick(present))
        for index, sample in zip(present.tolist(), block.samples(0, len(present)), strict=True):
            samples[index] = sample
        return BuiltBlock(samples)


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


@dataclass(frozen=True)
class ReadDataset(Dataset[Any]):
    """Yield the samples that `reader` returns for the rows of a plan.

    Args:
        plan: Returns the plan for a number of lanes; called if a lane has no plan of its own.
        reader: Reads samples.
        check: Called with each sample that could not be read; raises its error, which counts.
        leaf: The only leaf of the plan, if the reader has several; None for all of its leaves.
    """

    plan: Callable[[int], Plan]
    reader: Reader
    check: Hook = field(default_factory=lambda: Hook("read", raise_unreadable))
    leaf: int | None = None

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ReadIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.plan(lanes).num_rows(lane)

    def read_again(self, lane: Lane, item_states: Sequence[ItemState]) -> list[Any]:
        if not item_states:
            return []
        if not all(isinstance(item_state, int) for item_state in item_states):
            raise StateError(
                f"saved state has item states {item_states!r:.100}, which no stage writes; it is "
                "damaged or was edited"
            )
        plan = lane.reading.plan or self.plan(lane.lanes)
        rows = plan.at(lane.number, np.array(item_states, np.int64))
        samples = self.reader.read(rows).samples(0, len(item_states))
        for number in [n for n, row in enumerate(item_states) if row in lane.skip_rows]:
            log_skipped(lane, item_states[number], samples[number])
            samples[number] = SKIPPED
        if UnreadableSample in map(type, samples):
            runner = HookRunner(self.check, lane)
            for number, sample in enumerate(samples):
                if type(sample) is UnreadableSample:
                    samples[number] = runner(sample, key_of(sample) or ())
        return samples

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        numbers = key[:3]
        if len(numbers) < 3 or not all(isinstance(part, int) and part >= 0 for part in numbers):
            raise StateError(f"{key} is not the restore key of a sample: (leaf, epoch, ordinal, …)")
        if self.leaf not in (None, numbers[0]):
            raise StateError(f"{key} is the key of a sample of another dataset")
        self.register_finder(lane)
        leaf, epoch, ordinal = (np.array([number], np.int64) for number in numbers)
        try:
            block = self.reader.read(Rows(leaf.astype(np.int32), epoch, ordinal))
            (sample,) = block.samples(0, 1)
        except IndexError as error:
            raise StateError(f"there is no sample {numbers} in these datasets") from error
        if type(sample) is UnreadableSample:
            raise_unreadable(sample)
        return sample, tuple(key[3:])

    def register_finder(self, lane: Lane) -> None:
        """Let user code in `lane` look up lane and row of the samples that this stage reads."""
        # Threads remember their last lane, which must not keep the stage and its files open.
        reference = weakref.ref(self)
        reading, lanes, stride, offset = lane.reading, lane.lanes, lane.stride, lane.offset

        def find(leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
            stage = reference()
            if stage is None or stage.leaf not in (None, leaf):
                return None
            plan = reading.plan or stage.plan(lanes)
            try:
                position = plan.find(leaf, epoch, ordinal)
            except ConfigError:  # drawn with replacement
                position = None
            if position is None:
                return None
            number, row = position
            return number, row * stride + offset

        lane.current.finders[self.leaf, lane.stride, lane.offset] = find


class _ReadIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"row": int}

    puts_back = True

    def __init__(self, stage: ReadDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.reading = lane.reading
        self.rows = LaneRows(lane, stage.plan)
        # How far the lane had been read before the last samples were taken.
        self._read_before = 0
        self._checker = HookRunner(stage.check, lane)
        # The row after the last sample that could not be read.
        self._checked_row = 0
        self._blocks = BlockReader.of(self.rows, stage, stage.reader, lane.reading.plan)
        stage.register_finder(lane)

    @property
    def row(self) -> int:
        rows = self.rows
        return rows.row if rows.existing is None else rows.next_number

    @property
    def item_state(self) -> ItemState:
        rows = self.rows
        return rows.row - 1 if rows.existing is None else rows.numbers(rows.row - 1, 1)[0]

    def __next__(self) -> Any:
        samples, _ = self.take(1)
        if not samples:
            raise StopIteration
        return samples[0]

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[int]]:
        rows, skip_rows = self.rows, self.lane.skip_rows
        while rows.parts or self._read(count):
            part = rows.parts[0]
            start, stop = part.start, min(part.start + count, part.stop)
            part.start = stop
            if stop == part.stop:
                rows.parts.popleft()
            count = stop - start
            numbers: Sequence[int] = range(rows.row, rows.row + count)
            if rows.existing is not None:
                numbers = rows.numbers(rows.row, count)
            rows.row, self._read_before = rows.row + count, self.reading.row
            self.reading.row = max(self._read_before, numbers[-1] + 1)
            has_columns = part.block.column_names and not skip_rows
            if as_columns and has_columns and stop == start + count:
                return part.block.columns(start, stop), numbers
            samples = part.block.samples(start, stop)
            if not skip_rows and _NOT_PASSED_ON.isdisjoint(map(type, samples)):
                return samples, numbers
            present = self._present(samples, numbers)
            if present:
                return list(present.values()), list(present)
        return [], []

    def put_back(self, items: Sequence[Any], item_states: Sequence[int]) -> None:
        rows, start = self.rows, self.rows.row
        while rows.numbers(start, 1)[0] > item_states[0]:
            start -= 1
        numbers = rows.numbers(start, rows.row - start)
        at = {row: number for number, row in enumerate(numbers)}
        samples: list[Any] = [SKIPPED] * len(numbers)
        for sample, row in zip(items, item_states, strict=True):
            samples[at[row]] = sample
        rows.parts.appendleft(BlockPart(BuiltBlock(samples), 0, len(samples)))
        rows.row, self.reading.row = start, max(self._read_before, item_states[0])

    def _present(self, samples: Sequence[Any], rows: Sequence[int]) -> dict[int, Any]:
        """Return samples by their rows, without the missing, skipped and unreadable ones."""
        present = {
            row: each for row, each in zip(rows, samples, strict=True) if each is not SKIPPED
        }
        for row in sorted(self.lane.skip_rows & present.keys()):
            log_skipped(self.lane, row, present.pop(row))
        for row in [row for row, each in present.items() if type(each) is UnreadableSample]:
            # The samples before it have passed the check.
            if row > self._checked_row:
                self._checker.succeed(row - self._checked_row)
            self._checked_row, sample = row + 1, present.pop(row)
            self._checker(sample, key_of(sample) or ())
        return present

    def state_dict(self) -> State:
        rows = self.rows
        return {"row": rows.row if rows.existing is None else rows.next_start}

    def load_state_dict(self, state: State) -> None:
        (row,) = unpack(state, self.saves)
        self.rows.go_to(row)
        self._checked_row = row

    def _read(self, requested: int) -> bool:
        """Read the next rows; return False at the end of the lane."""
        began = perf_counter()
        # Samples of a unit are taken one by one, which would be as many reads.
        self._blocks.read(self.rows, max(requested, self.rows.left_of_unit()))
        host, now = self.lane.host, perf_counter()
        host.read_seconds += now - began
        if host.clock is not None and host.clock.spans is not None:
            host.clock.spans.append(HookSpan("read", -1, began, now))
        return bool(self.rows.parts)


def log_skipped(lane: Lane, row: int, sample: Any) -> None:
    """Log and count that a sample is skipped because its row is one of `lane.skip_rows`."""
    seed_key = key_of(sample) or ("lane", lane.number, row)
    lane.counts["skipped after killing workers"] += 1
    logger.error(
        "skipped row %d of lane %d, sample %s: it crashed workers or is excluded by the restored "
        "state",
        row,
        lane.number,
        flat(seed_key),
    )


@dataclass(frozen=True)
class ChangesDataset(ThroughDataset):
    """Yield the items of `dataset`, whose plan changes its mix at the rows in the state.

    Args:
        dataset: The items.
        plan: The order.
        changes: How many mixes the plan has besides the first.
    """

    dataset: Dataset[Any]
    plan: Plan
    changes: int = 0

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return ChangesIterator(self, lane)


class ChangesIterator(ThroughIterator):
    """Adds to the state which rows of the lane were read, and where its mix changed."""

    saves: ClassVar[Mapping[str, StateKind]] = {
        "inner": dict | None,
        "read": int,
        "changes": list,
    }

    def __init__(self, stage: ChangesDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self._begin(None)
        self.inner = stage.dataset.open(lane)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is done to the items: who draws them from the stage below moves this along.
        return iter(self.inner)

    def __next__(self) -> Any:
        return next(self.inner)

    def take(self, count: int, *, as_columns: bool = False) -> tuple[Any, Sequence[ItemState]]:
        return self.inner.take(count, as_columns=as_columns)

    def state_dict(self) -> State:
        return {
            "inner": self.inner.state_dict(),
            "read": self.lane.reading.row,
            "changes": list(self.changes),
        }

    def load_state_dict(self, state: State) -> None:
        inner, self.lane.reading.row, _ = unpack(state, self.saves)
        self.lane.reading.opened_at = self.lane.reading.row
        self._begin(state)
        if inner is not None:
            self.inner.load_state_dict(inner)

    def _begin(self, state: State | None) -> None:
        self.changes = rows_of_changes(state, self.stage.changes)
        self.lane.reading.plan = self.stage.plan.with_changes(self.lane.number, self.changes)


def rows_of_changes(state: State | None, count: int) -> tuple[int, ...]:
    """Return the rows of a lane at which `count` changes took place.

    Changes that are not in the state take place now, with the next row that is read.

    Args:
        state: State of the lane; None if nothing was read.
        count: Number of changes of the run.
    """
    if state is None:
        return (0,) * count
    changes = tuple(state["changes"])
    if len(changes) > count or not all(isinstance(row, int) for row in changes):
        raise StateError(
            f"saved state has changes at rows {changes!r:.100}, expected rows of at most {count} "
            "changes of the mix; it is damaged or was edited"
        )
    return (*changes, *[state["read"]] * (count - len(changes)))


def begin_changes(
    states: Mapping[int, State | None], recipe: PlanRecipe, lanes: int
) -> dict[int, State | None]:
    """Return states of lanes with all changes of a run; the new ones take place now.

    Args:
        states: States of the known lanes; None if nothing was read.
        recipe: The order, with the changes.
        lanes: Number of lanes of the run.

    Raises:
        StateError: If lanes are missing that share a stream with one of these.
    """
    begun = dict(states)
    count, plan, deal = len(recipe.past), recipe(lanes), recipe.deal(lanes)
    together = [deal.lanes_of(stream) for stream in sorted({deal.stream_of(v) for v in states})]
    if isinstance(plan, BalancedPlan):
        together = [list(range(lanes))]
    for members in together if count else ():
        own = {lane: states.get(lane) for lane in members}
        saved = {
            lane: unpack(state, ChangesIterator.saves)
            for lane, state in own.items()
            if state is not None
        }
        for lane in saved:
            rows_of_changes(own[lane], count)
        if all(len(changes) == count for _, _, changes in saved.values()):
            continue
        missing = sorted(own.keys() - states.keys())
        if missing:
            raise StateError(
                f"another mix begins in lanes {', '.join(map(str, own))} together, but the state "
                f"has nothing of {', '.join(map(str, missing))}; pass a global state or the states "
                "of all ranks"
            )
        start = _first_unread(plan, {lane: rows for lane, (_, rows, _) in saved.items() if rows})
        for lane in own:
            inner, rows, changes = saved.get(lane, (None, 0, []))
            changes = [*changes, *[start] * (count - len(changes))]
            begun[lane] = {"inner": inner, "read": rows, "changes": changes}
    return begun


def _first_unread(plan: Plan, rows: Mapping[int, int]) -> int:
    """Return the row of streams from which on some lanes have read nothing.

    Args:
        plan: Their order.
        rows: How many rows each has read.
    """
    if not isinstance(plan, BalancedPlan):
        ends = [int(plan.stream_rows(v, np.array([read - 1]))[0]) + 1 for v, read in rows.items()]
        return max(ends, default=0)
    # Lanes exchange samples within windows, each of which has to be of one mix.
    first = plan.first_unread(max(rows.values(), default=0))
    return first * plan.plan.lanes_of_stream
