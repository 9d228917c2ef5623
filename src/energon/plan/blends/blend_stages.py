"""The stages of the lanes of a blend: where shares change, and the draws until then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.plan.blends.curve import Clock
from energon.plan.blends.mix import Mix, Mixtures, Pattern
from energon.plan.leaves.leaf_order import LeafOrder
from energon.plan.line import Line
from energon.plan.randomness import derive_seed, permute


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
        rounds, place = np.divmod(turn, self.pattern.size)
        number = self.pattern.number[place]
        source = self.columns[number]
        counted = rounds * self.pattern.counts[number] + self.pattern.rank[place]
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
        place = self.pattern.place_of(int(numbers[0]), turn) * self.unit + within
        return place - self.entry + self.start

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


def _count(stage: MixStage, place: int) -> Ints:
    """Return how often each source occurs in the repeated pattern before a row."""
    turn, within = divmod(place, stage.unit)
    counts = stage.pattern.count_until(turn) * stage.unit
    if within:
        counts[stage.pattern.number[turn % stage.pattern.size]] += within
    found = np.zeros(len(stage.drawn), np.int64)
    present = stage.columns >= 0
    found[stage.columns[present]] = counts[present]
    return found


_finding = RLock()
"""Threads that read ahead ask for the stages of lanes that others read."""


def _find_next(found: list[MixStage], more: Iterator[MixStage]) -> bool:
    """Append the next stage to the known ones; return False if there is none."""
    with _finding:
        stage = next(more, None)
        if stage is not None:
            found.append(stage)
    return stage is not None


@dataclass(frozen=True)
class BlendStages:
    """The stages of all lanes, each computed when it is first needed.

    Args:
        mixes: Shares over sources, one after another.
        changes: For each lane, the row at which each mix but the first began.
        lines: The sources.
        gone: Names of the sources -1, -2, …, which are no longer there.
        order: Says how many draws of a source a lane has.
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
    _found: dict[int, tuple[list[MixStage], Iterator[MixStage]]] = field(default_factory=dict)

    def until(self, lane: int, row: int | None) -> list[MixStage]:
        """Return the stages of a lane up to the one that contains a row, or all."""
        found, more = self._of(lane)
        while not found or ((stop := found[-1].stop) is not None and (row is None or stop < row)):
            if not _find_next(found, more):
                break
        return found

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
        places = (self._row_from(lane, source, draw, start) for start in (*reversed(moved), 0))
        return next((row for row in places if row is not None), None)

    def _row_from(self, lane: int, source: int, draw: int, start: int) -> int | None:
        """Return the first row, at least `start`, in which a lane draws from a source."""
        found, more = self._of(lane)
        number = 0
        while True:
            if number == len(found) and not _find_next(found, more):
                return None
            stage = found[number]
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
        return self._found.setdefault(lane, ([], self._walk(lane)))

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
