"""Read the samples of a lane in the order of its plan.

The position is one number, the row of the next sample, and reading can start at any.

A run may be restored with another mix. Rows that were already read keep their order, since stages
that hold items back read them again; the new mix begins with the first row of a stream that none
of its lanes has read. From then on, that row is part of their states.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from energon.errors import ConfigError, StateError
from energon.plan.balance import BalancedPlan
from energon.plan.dealt import DealtPlan
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import Plan, Rows
from energon.samples.crude import RestoreKey
from energon.stages.base import (
    Dataset,
    DatasetIterator,
    ItemPlace,
    State,
    StateKind,
    ThroughDataset,
    ThroughIterator,
    unpack,
)
from energon.stages.hooks.clock import HookSpan
from energon.stages.lane import Lane
from energon.stages.reading.block_reading import GAP, BlocksOfLane, ReadSamples, RowsOfLane
from energon.stages.reading.blocks import Reader
from energon.stages.reading.shared_reading import BlocksOfLanes


@dataclass(frozen=True)
class ReadDataset(Dataset[Any]):
    """Yield what `reader` returns for the rows of a plan.

    Args:
        plan: Returns the plan for a number of lanes; called if a lane has no plan of its own.
        reader: Reads samples.
        leaf: The only leaf of the plan, if the reader has several; None for all of its leaves.
    """

    plan: Callable[[int], Plan]
    reader: Reader
    leaf: int | None = None

    def _open(self, lane: Lane) -> DatasetIterator[Any]:
        return _ReadIterator(self, lane)

    def num_items(self, lane: int, lanes: int) -> int | None:
        return self.plan(lanes).num_rows(lane)

    def read_again(self, lane: Lane, places: Sequence[ItemPlace]) -> list[Any]:
        if not places:
            return []
        if not all(isinstance(place, int) for place in places):
            raise StateError(
                f"saved state has the places {places!r:.100}, which no stage writes; it is "
                "damaged or was edited"
            )
        plan = lane.reading.plan or self.plan(lane.lanes)
        return self.reader.read(plan.at(lane.number, np.array(places, np.int64)))

    def restore(self, lane: Lane, key: RestoreKey) -> tuple[Any, RestoreKey]:
        numbers = key[:3]
        if len(numbers) < 3 or not all(isinstance(part, int) and part >= 0 for part in numbers):
            raise StateError(f"{key} is not the restore key of a sample: (leaf, epoch, ordinal, …)")
        if self.leaf not in (None, numbers[0]):
            raise StateError(f"{key} is the key of a sample of another dataset")
        self.register_finder(lane)
        leaf, epoch, ordinal = (np.array([number], np.int64) for number in numbers)
        try:
            sample = self.reader.read(Rows(leaf.astype(np.int32), epoch, ordinal))[0]
        except IndexError as error:
            raise StateError(f"there is no sample {numbers} in these datasets") from error
        return sample, tuple(key[3:])

    def register_finder(self, lane: Lane) -> None:
        """Let user code in `lane` look up the places of the samples that this stage reads."""
        # Threads remember their last lane, which must not keep the stage and its files open.
        reference = weakref.ref(self)
        reading, lanes, stride, offset = lane.reading, lane.lanes, lane.stride, lane.offset

        def find(leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
            stage = reference()
            if stage is None or stage.leaf not in (None, leaf):
                return None
            plan = reading.plan or stage.plan(lanes)
            try:
                found = plan.find(leaf, epoch, ordinal)
            except ConfigError:  # drawn with replacement
                found = None
            if found is None:
                return None
            number, row = found
            return number, row * stride + offset

        lane.current.finders[self.leaf, lane.stride, lane.offset] = find


class _ReadIterator(DatasetIterator[Any]):
    saves: ClassVar[Mapping[str, StateKind]] = {"row": int}

    def __init__(self, stage: ReadDataset, lane: Lane) -> None:
        self.stage = stage
        self.lane = lane
        self.reading = lane.reading
        self.rows = RowsOfLane(lane, stage.plan)
        # Samples that are built but not yet taken.
        self._waiting: list[Any] = []
        plan, reader = lane.reading.plan, stage.reader
        self._blocks = (
            BlocksOfLanes.of(self.rows, stage, reader, plan)
            if isinstance(plan, DealtPlan | BalancedPlan)
            else BlocksOfLane(reader)
        )
        stage.register_finder(lane)

    @property
    def row(self) -> int:
        return self.rows.row

    @property
    def place(self) -> ItemPlace:
        return self.rows.row - 1

    def __next__(self) -> Any:
        while True:
            if not (self._waiting or self.peek(1) or self._waiting):
                raise StopIteration
            sample = self._waiting.pop(0)
            self.rows.row += 1
            if self.rows.row > self.reading.row:
                self.reading.row = self.rows.row
            if sample is not GAP and self.rows.row - 1 not in self.lane.skip_rows:
                return sample

    def take(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count:
            found = self.peek(count - len(samples)) or self._waiting[: count - len(samples)]
            if not found:
                break
            start = self.rows.row
            self.advance(len(found))
            if self.rows.has_gaps or self.lane.skip_rows:
                samples += self._present(found, start)
            else:
                samples += found
        return samples

    def _present(self, found: list[Any], start: int) -> Iterator[Any]:
        """Yield the samples from a row on, without those that are missing or skipped."""
        left_out = self.lane.skip_rows
        for row, sample in enumerate(found, start):
            if sample is not GAP and row not in left_out:
                yield sample

    def take_placed(self, count: int) -> tuple[list[Any], list[ItemPlace]]:
        start = self.rows.row
        samples = self.peek(count)
        if not samples or self.lane.skip_rows:
            return super().take_placed(count)
        self.advance(len(samples))
        return samples, list(range(start, self.rows.row))

    def take_columns(self, count: int) -> Any:
        pending = self.rows.pending
        if self._waiting or self.rows.has_gaps or self.lane.skip_rows:
            return None
        if not pending:
            try:
                self._read(count)
            except StopIteration:
                return None
        found = _take_columns(pending[0], count)
        if found is not None:
            if pending[0].start == pending[0].stop and not pending[0].move_on():
                pending.pop(0)
            self.advance(count)
        return found

    def peek(self, count: int) -> list[Any]:
        waiting, pending = self._waiting, self.rows.pending
        if not (waiting or pending):
            try:
                self._read(count)
            except StopIteration:
                return []
        while pending and len(waiting) < count:
            run = pending[0]
            waiting += _take(run, count - len(waiting))
            if run.start == run.stop and not run.move_on():
                pending.pop(0)
        if not waiting:  # what was read has just come to its end
            return self.peek(count)
        return [] if self.rows.has_gaps else waiting[:count]

    def advance(self, count: int) -> None:
        del self._waiting[:count]
        self.rows.row += count
        self.reading.row = max(self.reading.row, self.rows.row)

    def state_dict(self) -> State:
        return {"row": self.rows.row}

    def load_state_dict(self, state: State) -> None:
        (row,) = unpack(state, self.saves)
        self.rows.go_to(row)
        self._waiting = []

    def _read(self, requested: int) -> None:
        began = perf_counter()
        self._blocks.read(self.rows, requested)
        host, now = self.lane.host, perf_counter()
        host.read_seconds += now - began
        if host.clock is not None and host.clock.spans is not None:
            host.clock.spans.append(HookSpan("read", -1, began, now))
        if self.rows.row == self.rows.stop:
            raise StopIteration


def _take(run: ReadSamples, count: int) -> list[Any]:
    """Return up to `count` of the next samples of a run."""
    start, block = run.start, run.block
    count = min(count, run.stop - start)
    run.start += count
    samples = run.own
    if samples is None and block is not None:
        if block.row == start:
            block.row += count
            samples = block.samples
        else:
            samples = run.own = block.lazy.between(start, run.stop)
    take: Callable[[int], list[Any]] | None = getattr(samples, "take", None)
    return list(islice(samples or (), count)) if take is None else take(count)


def _take_columns(run: ReadSamples, count: int) -> Any:
    """Return the next samples of a run as one, or None; see `LazyRows.between`."""
    start, block = run.start, run.block
    shared = block if run.own is None and block is not None and block.row == start else None
    columns = getattr(run.own if shared is None else shared.samples, "columns", None)
    if columns is None or start + count > run.stop:
        return None
    run.start += count
    if shared is not None:
        shared.row += count
    return columns(count)


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

    def take(self, count: int) -> list[Any]:
        return self.inner.take(count)

    def state_dict(self) -> State:
        return {
            "inner": self.inner.state_dict(),
            "read": self.lane.reading.row,
            "changes": list(self.changes),
        }

    def load_state_dict(self, state: State) -> None:
        inner, self.lane.reading.row, _ = unpack(state, self.saves)
        self.lane.reading.known = self.lane.reading.row
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
    known = tuple(state["changes"])
    if len(known) > count or not all(isinstance(row, int) for row in known):
        raise StateError(
            f"saved state has changes at rows {known!r:.100}, expected rows of at most {count} "
            "changes of the mix; it is damaged or was edited"
        )
    return (*known, *[state["read"]] * (count - len(known)))


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
        known = {lane: states.get(lane) for lane in members}
        found = {
            lane: unpack(state, ChangesIterator.saves)
            for lane, state in known.items()
            if state is not None
        }
        for lane in found:
            rows_of_changes(known[lane], count)
        if all(len(changes) == count for _, _, changes in found.values()):
            continue
        missing = sorted(known.keys() - states.keys())
        if missing:
            raise StateError(
                f"another mix begins in lanes {', '.join(map(str, known))} together, but the state "
                f"has nothing of {', '.join(map(str, missing))}; pass a global state or the states "
                "of all ranks"
            )
        start = _first_unread(plan, {lane: rows for lane, (_, rows, _) in found.items() if rows})
        for lane in known:
            inner, rows, changes = found.get(lane, (None, 0, []))
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
    windows = -(-max(rows.values(), default=0) // plan.window_rows)
    return windows * plan.window_rows * plan.plan.lanes_of_stream
