"""Blend sources by weight, in shares that are nearly exact in every interval.

A source is a leaf, or a line of leaves. Every lane reads a pattern of sources (`blend_stages.py`)
from a phase of its own, so lanes agree on shares but not on turns. How often a source came
before any row follows from the number of full rounds and a rank in the pattern; with it, the
number of the draw, and everything else is the order of the source.

Shares change at rows: those that a schedule names, those at which the run was restored with
another mix, and those at which a lane has made its last draw of a source that is used up. A
*stage* is between two changes. Counts at the beginning of a stage are the base of what
follows (`blend_stages.py`), so the draws of a source continue without a gap and its epochs stay
exact.

Of a source with a limit of D draws, lane v may make those with k·V + v < D. Over all lanes
these are the first D, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import StateError
from energon.plan.blends.blend_stages import BlendStages
from energon.plan.blends.curve import Clock
from energon.plan.blends.mix import Mix
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.leaves.leaf_order import Era, LeafOrder
from energon.plan.line import Line
from energon.plan.rows import LanesAreStreams, Rows


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
        place = np.searchsorted(starts, rows, side="right") - 1
        source = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        for number in sorted(set(place.tolist())):
            stage = stages[number]
            chosen = slice(None) if (place == number).all() else np.flatnonzero(place == number)
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
        found = self._lines[source].find(number, epoch, ordinal)
        if found is None:
            return None
        from energon.plan.leaves.find_draw import find_draw

        drawn = find_draw(self._order, source, *found)
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

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
