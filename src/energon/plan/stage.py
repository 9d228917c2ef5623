"""A part of a lane of a blend over which shares do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.plan.leaf import Ints
from energon.plan.pattern import Pattern


class Stage(NamedTuple):
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
        """Return for each row the source, and how often it was drawn before."""
        turn, within = np.divmod(rows - self.start + self.entry, self.unit)
        rounds, place = np.divmod(turn, self.pattern.size)
        number = self.pattern.number[place]
        source = self.columns[number]
        counted = rounds * self.pattern.counts[number] + self.pattern.rank[place]
        # What is gone has no base: nobody can ask for its draws.
        return source, counted * self.unit + within + self.base[np.maximum(source, 0)]

    def drawn_until(self, row: int) -> Ints:
        """Return how often each source was drawn before a row of the stage, or its end."""
        return _count(self, self.entry + row - self.start) + self.base

    def row_of(self, source: int, draw: int) -> int | None:
        """Return with which row of the stage a draw is made; None if it draws no such source."""
        (numbers,) = np.nonzero(self.columns == source)
        if not len(numbers) or not self.pattern.counts[numbers[0]]:
            return None
        turn, within = divmod(draw - int(self.base[source]), self.unit)
        place = self.pattern.place_of(int(numbers[0]), turn) * self.unit + within
        return place - self.entry + self.start

    def turn_at(self, row: int, pattern: Pattern) -> int:
        """Return which entry of another pattern lies as far in it as `row` does in this one."""
        turn = (self.entry + row - self.start) // self.unit % self.pattern.size
        return turn * pattern.size // self.pattern.size

    def first_end(self, quotas: Mapping[int, int], stop: int | None) -> int | None:
        """Return where the stage ends: at the first draw that its source does not have.

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
) -> Stage:
    """Return a stage, its end unknown, before which sources were `drawn` so often."""
    stage = Stage(start, None, pattern, entry, columns, drawn, drawn, unit)
    return stage._replace(base=drawn - _count(stage, entry))


def _count(stage: Stage, place: int) -> Ints:
    """Return how often each source comes in the repeated pattern before a place in rows."""
    turn, within = divmod(place, stage.unit)
    counts = stage.pattern.count_until(turn) * stage.unit
    if within:
        counts[stage.pattern.number[turn % stage.pattern.size]] += within
    found = np.zeros(len(stage.drawn), np.int64)
    present = stage.columns >= 0
    found[stage.columns[present]] = counts[present]
    return found
