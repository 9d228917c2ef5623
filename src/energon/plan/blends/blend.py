"""Blend sources by weight, in shares that are nearly exact in every interval.

A source is a leaf, or a line of leaves. Every lane reads a pattern of sources (`MixStage`)
from a phase of its own, so lanes agree on shares but not on turns. How often a source came
before any row follows from the number of full rounds and a rank in the pattern; with it, the
number of the draw, and everything else is the order of the source.

Shares change at rows: those that a schedule names, those at which the run was restored with
another mix, and those at which a lane has made its last draw of a source that is used up. A
*stage* is between two changes. Counts at the beginning of a stage are the base of what
follows (`BlendStages`), so the draws of a source continue without a gap and its epochs stay
exact.

Of a source with a limit of D draws, lane v may make those with k·V + v < D. Over all lanes
these are the first D, exactly.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from threading import RLock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import StateError
from energon.plan.blends.curve import Clock
from energon.plan.blends.mix import Mix, Mixtures, Pattern
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.leaves.leaf_order import Era, LeafOrder, find_draw
from energon.plan.line import Line
from energon.plan.randomness import derive_seed, permute
from energon.plan.rows import LanesAreStreams, Rows


class MixStage(NamedTuple):
    """Rows over which the shares of a lane do not change."""

    start: int
    stop: int | None
    """None: it never ends."""
    pattern: Pattern
    entry: int
    """Where in the repeated pattern, counted in rows, `start` lies."""
    columns: NDArray[np.int32]
    """The source that each number of the pattern stands for; below 0, one that is gone."""
    base: Ints
    """What to add to the count of each source within the pattern."""
    drawn: Ints
    """How often each source was drawn before."""
    unit: int
    """Consecutive rows that come from one source."""

    def at(self, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the source of each row, and how often it was drawn before."""
        turn, within = np.divmod(rows - self.start + self.entry, self.unit)
        rounds, index = np.divmod(turn, self.pattern.size)
        number = self.pattern.number[index]
        source = self.columns[number]
        counted = rounds * self.pattern.counts[number] + self.pattern.rank[index]
        # A removed entry has no base: its draws cannot be computed.
        return source, counted * self.unit + within + self.base[np.maximum(source, 0)]

    def drawn_until(self, row: int) -> Ints:
        """Return how often each source was drawn before a row of the stage, or its end."""
        return _count(self, self.entry + row - self.start) + self.base

    def row_of(self, source: int, draw: int) -> int | None:
        """Return the row of the stage that makes a draw; None if the stage lacks the source."""
        (numbers,) = np.nonzero(self.columns == source)
        if not len(numbers) or not self.pattern.counts[numbers[0]]:
            return None
        turn, within = divmod(draw - int(self.base[source]), self.unit)
        pattern_row = self.pattern.index_of(int(numbers[0]), turn) * self.unit + within
        return pattern_row - self.entry + self.start

    def turn_at(self, row: int, pattern: Pattern) -> int:
        """Return the entry of another pattern that is as far into it as `row` is into this one."""
        turn = (self.entry + row - self.start) // self.unit % self.pattern.size
        return turn * pattern.size // self.pattern.size

    def first_end(self, quotas: Mapping[int, int], stop: int | None) -> int | None:
        """Return the end of the stage: the first draw beyond the limit of its source.

        Args:
            quotas: How many draws there are of sources with a limit.
            stop: Where it ends at last; None for nowhere.
        """
        for source, quota in quotas.items():
            row = self.row_of(source, quota)
            if row is not None:
                stop = row if stop is None else min(stop, row)
        return stop


def begin_stage(
    start: int,
    pattern: Pattern,
    entry: int,
    columns: NDArray[np.int32],
    drawn: Ints,
    unit: int,
) -> MixStage:
    """Return a stage with an unknown end; `drawn` are the draws from each source before it."""
    stage = MixStage(start, None, pattern, entry, columns, drawn, drawn, unit)
    return stage._replace(base=drawn - _count(stage, entry))


def _count(stage: MixStage, pattern_row: int) -> Ints:
    """Return how often each source occurs in the repeated pattern before a row."""
    turn, within = divmod(pattern_row, stage.unit)
    counts = stage.pattern.count_until(turn) * stage.unit
    if within:
        counts[stage.pattern.number[turn % stage.pattern.size]] += within
    occurrences = np.zeros(len(stage.drawn), np.int64)
    present = stage.columns >= 0
    occurrences[stage.columns[present]] = counts[present]
    return occurrences


_finding = RLock()
"""Threads that read ahead ask for the stages of lanes that others read. A fork waits for them: its
child lacks the thread that would release the lock, and go on with the next stage."""
os.register_at_fork(
    before=_finding.acquire,
    after_in_parent=_finding.release,
    after_in_child=_finding.release,
)


def _find_next(stages: list[MixStage], more: Iterator[MixStage]) -> bool:
    """Append the next stage to the known ones; return False if there is none."""
    with _finding:
        stage = next(more, None)
        if stage is not None:
            stages.append(stage)
    return stage is not None


@dataclass(frozen=True)
class BlendStages:
    """The stages of all lanes, each computed when it is first needed.

    Args:
        mixes: Shares over sources, one after another.
        changes: For each lane, the row at which each mix but the first began.
        lines: The sources.
        gone: Names of the sources -1, -2, …, which are no longer there.
        order: The number of draws of a source in each lane.
        clock: Tells the rows of positions.
        seed: Seed of the run.
        unit: Consecutive rows of a lane that come from one source.
        moves: For each change, the draws with which sources continue from there, by their numbers.
    """

    mixes: Sequence[Mix]
    changes: Mapping[int, tuple[int, ...]]
    lines: Sequence[Line]
    gone: Sequence[str]
    order: LeafOrder
    clock: Clock
    seed: int
    unit: int
    moves: Sequence[Mapping[int, int]] = ()
    _stages: dict[int, tuple[list[MixStage], Iterator[MixStage]]] = field(default_factory=dict)

    def until(self, lane: int, row: int | None) -> list[MixStage]:
        """Return the stages of a lane up to the one that contains a row, or all."""
        stages, more = self._of(lane)
        while not stages or ((stop := stages[-1].stop) is not None and (row is None or stop < row)):
            if not _find_next(stages, more):
                break
        return stages

    def end(self, lane: int, until: int | None) -> int | None:
        """Return the end of a lane, or some row at or after `until`; None if there is no end."""
        stages = self.until(lane, until)
        return stages[-1].stop if stages else 0

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None if there is no end."""
        return self.end(lane, None) if self._mix(lane, None).limits else None

    def row_of(self, lane: int, source: int, draw: int) -> int | None:
        """Return the row in which a lane makes a draw from a source; None if it never does.

        Where a source was set back, that is the later one of two rows.
        """
        moved = [
            row
            for row, moves in zip(self.changes.get(lane, ()), self.moves, strict=False)
            if source in moves
        ]
        rows = (self._row_from(lane, source, draw, start) for start in (*reversed(moved), 0))
        return next((row for row in rows if row is not None), None)

    def _row_from(self, lane: int, source: int, draw: int, start: int) -> int | None:
        """Return the first row, at least `start`, in which a lane draws from a source."""
        stages, more = self._of(lane)
        number = 0
        while True:
            if number == len(stages) and not _find_next(stages, more):
                return None
            stage = stages[number]
            if stage.start >= start:
                if draw < stage.drawn[source]:
                    return None  # it was passed over, or comes before `start`
                if stage.stop is None or draw < stage.drawn_until(stage.stop)[source]:
                    return stage.row_of(source, draw)
            number += 1

    def limit(self, source: int, epochs: float) -> int:
        """Return how many draws from a source make up this many epochs."""
        return max(1, round(epochs * self.lines[source].length))

    def _of(self, lane: int) -> tuple[list[MixStage], Iterator[MixStage]]:
        """Return the known stages of a lane, and the iterator that computes the others."""
        return self._stages.setdefault(lane, ([], self._walk(lane)))

    def _walk(self, lane: int) -> Iterator[MixStage]:
        """Yield the stages of a lane, forever if it has no end."""
        row: int | None = 0
        drawn = np.zeros(len(self.lines), np.int64)
        stage: MixStage | None = None
        while row is not None:
            mix = self._mix(lane, row)
            drawn = self._moved(lane, row, drawn)
            quotas = self._quotas(lane, mix)
            used = [source for source, quota in quotas.items() if drawn[source] >= quota]
            knot = self._next_knot(mix, row)
            # The shares of a ramp are those of its whole step, even if the mix changes within:
            # rows before a change are what they were before it.
            mixture = self._mixtures.of(mix, row, knot, used)
            if mixture is None:
                return
            stage = self._begin(lane, row, *mixture, drawn, stage)
            stop = self._next_change(lane, row, knot)
            stage = stage._replace(stop=stage.first_end(quotas, stop))
            yield stage
            row = stage.stop
            if row is not None:
                drawn = stage.drawn_until(row)

    def _begin(
        self,
        lane: int,
        row: int,
        pattern: Pattern,
        columns: NDArray[np.int32],
        drawn: Ints,
        before: MixStage | None,
    ) -> MixStage:
        # Where the last pattern was left: one that always began at the same place would prefer
        # what comes first in it, and the steps of a short ramp have few rows.
        turn = self._phase(lane, pattern) if before is None else before.turn_at(row, pattern)
        # Units begin at multiples of their size, as batches do.
        entry = turn * self.unit + row % self.unit
        return begin_stage(row, pattern, entry, columns, drawn, self.unit)

    def _moved(self, lane: int, row: int, drawn: Ints) -> Ints:
        """Return the draws of a lane that count for each source, where sources move at a row."""
        moved = drawn
        for change, moves in zip(self.changes.get(lane, ()), self.moves, strict=False):
            for source, total in moves.items() if change == row else ():
                moved = moved.copy() if moved is drawn else moved
                # Each lane continues with the first of its own draws that is not before.
                moved[source] = self.order.quota(lane, source, total)
        return moved

    def _mix(self, lane: int, row: int | None) -> Mix:
        """Return the mix at a row of a lane; its last mix if `row` is None."""
        changes = self.changes.get(lane, ())
        return self.mixes[len(changes) if row is None else bisect_right(changes, row)]

    def _next_knot(self, mix: Mix, row: int) -> int | None:
        """Return the first row after `row` at which a mix changes by its own schedule."""
        knots = self._knots[id(mix)]
        return next(iter(knots[bisect_right(knots, row) :]), None)

    def _next_change(self, lane: int, row: int, knot: int | None) -> int | None:
        """Return the next knot, or an earlier row at which another mix begins."""
        rows = [*self.changes.get(lane, ()), *(() if knot is None else (knot,))]
        return min((each for each in rows if each > row), default=None)

    def _quotas(self, lane: int, mix: Mix) -> dict[int, int]:
        """Return how many draws the lane has of each source with a limit."""
        return {
            source: self.order.quota(lane, source, self.limit(source, limit))
            for source, limit in mix.limits.items()
            if source >= 0
        }

    def _phase(self, lane: int, pattern: Pattern) -> int:
        return int(self._phases[lane]) * pattern.size // self.clock.lanes

    @cached_property
    def _phases(self) -> Ints:
        """The order in which lanes enter a pattern, one after another."""
        lanes = np.array([self.clock.lanes])
        key = np.array([derive_seed(self.seed, "phase")], np.uint64)
        return permute(np.arange(self.clock.lanes), lanes, key)

    def _name(self, source: int) -> str:
        return self.gone[-1 - source] if source < 0 else self.lines[source].order.uid

    @cached_property
    def _knots(self) -> dict[int, list[int]]:
        # No unit is cut by a change of weights.
        return {
            id(mix): sorted({-(-row // self.unit) * self.unit for row in mix.knots(self.clock)})
            for mix in self.mixes
        }

    @cached_property
    def _mixtures(self) -> Mixtures:
        return Mixtures(self._name, self.clock, self.seed)


@dataclass(frozen=True)
class BlendPlan(LanesAreStreams):
    """What is drawn from sources by weight.

    Args:
        leaves: All leaves, in the order in which rows number them.
        sources: For each source, its leaves.
        mixes: Shares over sources. The first holds from the beginning, the others since the
            run was restored with them. Sources that are no longer there have numbers below 0.
        lanes: V.
        seed: Seed of the run.
        unit: Consecutive rows of a lane that come from one source.
        batch_size: Rows of a batch, for schedules that count batches.
        gone: Names of the sources -1, -2, …, which are no longer there.
        changes: For each lane, the row at which each mix but the first began; what is missing
            has not happened there.
        eras: What went before with other lanes; their draws are those of sources.
        clock: Tells the rows of positions; None for a run that began with these lanes.
        moves: For each change, the draws of all lanes with which sources continue, by their
            numbers.
        pass_number: How many passes there were before, up to the limits of all sources.
    """

    leaves: tuple[PlanLeaf, ...]
    sources: tuple[tuple[int, ...], ...]
    mixes: tuple[Mix, ...]
    lanes: int
    seed: int
    unit: int = 1
    batch_size: int = 1
    gone: tuple[str, ...] = ()
    changes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    eras: tuple[Era, ...] = ()
    clock: Clock | None = None
    moves: tuple[Mapping[int, int], ...] = ()
    pass_number: int = 0

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> BlendPlan:
        """Return the plan of a run in which `lane` changed its mix at `rows`.

        Each begins with a unit, or where the lane ended with the mix before.
        """
        if not rows and not self.changes.get(lane):
            return self
        changed = replace(self, changes={**self.changes, lane: ()})
        for row in rows:
            end, begin = changed.num_rows(lane), -(-row // self.unit) * self.unit
            begin = begin if end is None else min(begin, end)
            changed = replace(self, changes={**self.changes, lane: (*changed.changes[lane], begin)})
        return changed

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None if there is no end."""
        return self._stages.num_rows(lane)

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        stop = start + count
        if self._ends:
            end = self._stages.end(lane, stop)
            stop = stop if end is None else max(start, min(stop, end))
        return self.at(lane, np.arange(start, stop, dtype=np.int64), gaps=True)

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order; all rows must exist.

        Raises:
            StateError: If a row was drawn from a source that is gone, and `gaps` is not set: then
                its leaf is below 0.
        """
        return self.samples(*self.numbers(lane, rows), gaps=gaps)

    def samples(self, source: NDArray[np.int32], numbers: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples of draws, see `at`."""
        if (gone := source < 0).any():
            if not gaps:
                raise StateError(
                    f"samples of {self.gone[-1 - int(source.min())]} wait in a window that the run "
                    "should read again, but it is no longer in the blend; give it weight 0 instead "
                    "of removing it"
                )
            there = np.flatnonzero(~gone)
            drawn = self.samples(source[there], numbers[there])
            columns = [np.full(len(source), -1, column.dtype) for column in drawn]
            for column, values in zip(columns, drawn, strict=True):
                column[there] = values
            return Rows(*columns)
        epoch, ordinal = self._order.at(source, numbers)
        if self._is_plain:
            return Rows(source, epoch, ordinal)
        leaf = np.empty(len(source), np.int32)
        for number in sorted(set(source.tolist())):
            chosen = np.flatnonzero(source == number)
            of_line = self._lines[number].at(epoch[chosen], ordinal[chosen])
            leaf[chosen] = np.array(self.sources[number], np.int32)[of_line.leaf]
            epoch[chosen], ordinal[chosen] = of_line.epoch, of_line.ordinal
        return Rows(leaf, epoch, ordinal)

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        """Return the leaf of each of `rows` of a lane; below 0 for a gap."""
        if any(len(leaves) > 1 for leaves in self.sources):
            return self.at(lane, rows, gaps=True).leaf
        source, _ = self.draws(lane, rows)
        only = np.array([leaf for (leaf,) in self.sources], np.int32)
        return np.where(source < 0, source, only[source])

    def numbers(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the source of each row, and the number of the draw among all from that source."""
        source, draws = self.draws(lane, rows)
        return source, self._order.numbers(lane, source, draws)

    def quota(self, lane: int, source: int, total: int) -> int:
        """Return how many of the first `total` draws from a source are those of a lane."""
        return self._order.quota(lane, source, total)

    def draws(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the source of each row, below 0 if it was removed, and earlier draws from it."""
        if self._is_single:
            return np.zeros(len(rows), np.int32), rows
        stages = self._stages.until(lane, int(rows.max(initial=0)) + 1)
        starts = [stage.start for stage in stages]
        stage_number = np.searchsorted(starts, rows, side="right") - 1
        source = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        for number in sorted(set(stage_number.tolist())):
            stage = stages[number]
            chosen = (
                slice(None)
                if (stage_number == number).all()
                else np.flatnonzero(stage_number == number)
            )
            source[chosen], draws[chosen] = stage.at(rows[chosen])
        return source, draws

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf, or None.

        Also None if it is unknown at which rows its lane changed its mix.
        """
        source = next((n for n, leaves in enumerate(self.sources) if leaf in leaves), None)
        if source is None:
            return None
        number = self.sources[source].index(leaf)
        position = self._lines[source].find(number, epoch, ordinal)
        if position is None:
            return None
        drawn = find_draw(self._order, source, *position)
        if drawn is None:
            return None
        lane, draw = drawn
        if len(self.changes.get(lane, ())) < len(self.mixes) - 1:
            return None
        row = self._row_of(lane, source, draw)
        return None if row is None else (lane, row)

    def _row_of(self, lane: int, source: int, draw: int) -> int | None:
        """Return the row in which a lane makes a draw from a source; None if it never does."""
        return draw if self._is_single else self._stages.row_of(lane, source, draw)

    def last_row(self, source: int) -> tuple[int, int] | None:
        """Return the lane and row of the last draw from a source; None if there is none."""
        limit = self.mixes[-1].limits.get(source)
        if limit is None:
            return None
        drawn = self._order.lane_of(source, self._stages.limit(source, limit) - 1)
        if drawn is None:
            return None
        lane, draw = drawn
        row = self._row_of(lane, source, draw)
        return None if row is None else (lane, row)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`."""
        source, share = self._parts
        counts: NDArray[np.float64] = self.drawn(lane, row)[source] * share
        return counts

    def drawn(self, lane: int, row: int) -> Ints:
        """Return how often each source comes in the rows of a lane before `row`."""
        stages = self._stages.until(lane, row)
        if not stages:
            return np.zeros(len(self.sources), np.int64)
        stage = stages[bisect_right([stage.start for stage in stages], row) - 1]
        stop = row if stage.stop is None else min(row, stage.stop)
        return stage.drawn_until(stop)

    @cached_property
    def _ends(self) -> bool:
        return any(mix.limits for mix in self.mixes)

    @cached_property
    def _is_single(self) -> bool:
        """Whether there is only one source, so that its draws are the rows."""
        return len(self.sources) == len(self.mixes) == 1 and not self._ends

    @cached_property
    def _is_plain(self) -> bool:
        """Whether each source is the unchanged leaf of the same number."""
        return self.sources == tuple((number,) for number in range(len(self.leaves))) and all(
            leaf.repetitions == 1 for leaf in self.leaves
        )

    @cached_property
    def _lines(self) -> list[Line]:
        lines = [tuple(self.leaves[leaf] for leaf in source) for source in self.sources]
        return [Line(leaves, self.seed) for leaves in lines]

    @cached_property
    def _parts(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The source of each leaf, and the leaf's number within it."""
        source = np.zeros(len(self.leaves), np.int32)
        share = np.zeros(len(self.leaves))
        for number, leaves in enumerate(self.sources):
            source[list(leaves)] = number
            share[list(leaves)] = self._lines[number].shares
        return source, share

    @cached_property
    def _stages(self) -> BlendStages:
        return BlendStages(
            mixes=self.mixes,
            changes=self.changes,
            lines=self._lines,
            gone=self.gone,
            order=self._order,
            clock=self.clock or Clock(self.lanes, self.batch_size),
            seed=self.seed,
            unit=self.unit,
            moves=self.moves,
        )

    @cached_property
    def _order(self) -> LeafOrder:
        orders = self.leaves if self._is_plain else [line.order for line in self._lines]
        limits = self.mixes[-1].limits
        # Each pass begins with an epoch that none before has drawn from.
        first = [
            self.pass_number * ceil(limits.get(source, 0) / max(1, order.shuffle_over_epochs or 1))
            for source, order in enumerate(orders)
        ]
        return LeafOrder(orders, lanes=self.lanes, seed=self.seed, eras=self.eras, first=first)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
