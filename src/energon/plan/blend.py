"""Blend sources by weight, in shares that are nearly exact in every interval.

A source is a leaf, or a line of leaves. Every lane reads a pattern of sources (`pattern.py`)
from a phase of its own, so lanes agree on shares but not on turns. How often a source came
before any row follows from the number of full rounds and a rank in the pattern; with it, the
number of the draw, and everything else is the order of the source.

Shares change at rows: those that a schedule names, those at which the run was restored with
another mix, and those at which a lane has made its last draw of a source that is used up. A
*stage* lies between two changes. Counts at the beginning of a stage are the base of what
follows (`stage.py`), so the draws of a source go on without a gap and its epochs stay exact.

Of a source with a limit of D draws, lane v may make those with k·V + v < D. Over all lanes
these are the first D, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energon.errors import StateError
from energon.plan.curve import Clock
from energon.plan.find import find_draw
from energon.plan.leaf import Ints, LeafOrder, PlanLeaf
from energon.plan.line import Line
from energon.plan.mix import Mix
from energon.plan.mixtures import Mixtures
from energon.plan.pattern import Pattern
from energon.plan.permutation import permute
from energon.plan.rows import Rows
from energon.plan.seeds import derive_seed
from energon.plan.stage import Stage, begin_stage


@dataclass(frozen=True)
class BlendPlan:
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

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> BlendPlan:
        """Return the plan of a run in which `lane` took up the later mixes at `rows`."""
        aligned = tuple(-(-row // self.unit) * self.unit for row in rows)
        return replace(self, changes={**self.changes, lane: aligned})

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None if there is no end."""
        if not self._mix(lane, None).limits:
            return None
        return self._end(lane, None)

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        stop = start + count
        if self._ends:
            end = self._end(lane, stop)
            stop = stop if end is None else max(start, min(stop, end))
        return self.at(lane, np.arange(start, stop, dtype=np.int64))

    def at(self, lane: int, rows: Ints) -> Rows:
        """Return what comes at `rows` of a lane, in any order; all must exist."""
        source, draws = self.draws(lane, rows)
        epoch, ordinal = self._order.draw(lane, source, draws)
        if self._is_plain:
            return Rows(source, epoch, ordinal)
        leaf = np.empty(len(rows), np.int32)
        for number in np.unique(source).tolist():
            chosen = np.flatnonzero(source == number)
            found = self._lines[number].at(epoch[chosen], ordinal[chosen])
            leaf[chosen] = np.array(self.sources[number], np.int32)[found.leaf]
            epoch[chosen], ordinal[chosen] = found.epoch, found.ordinal
        return Rows(leaf, epoch, ordinal)

    def draws(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return for each row the source, and how often the lane drew from it before."""
        if len(self.sources) == len(self.mixes) == 1 and not self._ends:
            return np.zeros(len(rows), np.int32), rows
        stages = self._stages(lane, int(rows.max(initial=0)) + 1)
        starts = [stage.start for stage in stages]
        place = np.searchsorted(starts, rows, side="right") - 1
        source = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        for number in np.unique(place).tolist():
            stage = stages[number]
            chosen = slice(None) if (place == number).all() else np.flatnonzero(place == number)
            found, draws[chosen] = stage.at(rows[chosen])
            if found.min(initial=0) < 0:
                name = self.gone[-1 - int(found.min())]
                raise StateError(
                    f"lane {lane}: samples of {name} wait in a window that is to be read again, "
                    "but it is no longer in the blend; give it weight 0 instead of taking it out"
                )
            source[chosen] = found
        return source, draws

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return in which lane and row a sample comes in an epoch of its leaf, if it does."""
        source = next(n for n, leaves in enumerate(self.sources) if leaf in leaves)
        number = self.sources[source].index(leaf)
        found = self._lines[source].find(number, epoch, ordinal)
        if found is None:
            return None
        lane, draw = find_draw(self._order, source, *found)
        row = self._row_of(lane, source, draw)
        return None if row is None else (lane, row)

    def _row_of(self, lane: int, source: int, draw: int) -> int | None:
        """Return with which row a lane makes a draw from a source; None if it never does."""
        if len(self.sources) == len(self.mixes) == 1 and not self._ends:
            return draw
        found, more = self._found.setdefault(lane, ([], self._walk(lane)))
        number = 0
        while True:
            if number == len(found):
                stage = next(more, None)
                if stage is None:
                    return None
                found.append(stage)
            stage = found[number]
            if stage.stop is None or draw < stage.drawn_until(stage.stop)[source]:
                return stage.row_of(source, draw)
            number += 1

    def last_row(self, source: int) -> tuple[int, int] | None:
        """Return in which lane and row the last draw of a source comes; None if it has none."""
        limit = self.mixes[-1].limits.get(source)
        if limit is None:
            return None
        draw, lane = divmod(self._limit(source, limit) - 1, self.lanes)
        row = self._row_of(lane, source, draw)
        return None if row is None else (lane, row)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`."""
        source, share = self._parts
        counts: NDArray[np.float64] = self.drawn(lane, row)[source] * share
        return counts

    def drawn(self, lane: int, row: int) -> Ints:
        """Return how often each source comes in the rows of a lane before `row`."""
        stages = self._stages(lane, row)
        if not stages:
            return np.zeros(len(self.sources), np.int64)
        stage = stages[bisect_right([stage.start for stage in stages], row) - 1]
        stop = row if stage.stop is None else min(row, stage.stop)
        return stage.drawn_until(stop)

    def _end(self, lane: int, until: int | None) -> int | None:
        """Return where a lane ends, or a row at or behind `until`; None if there is no end."""
        stages = self._stages(lane, until)
        return stages[-1].stop if stages else 0

    def _stages(self, lane: int, until: int | None) -> list[Stage]:
        """Return the stages of a lane until some row, or all; the last one ends behind it."""
        found, more = self._found.setdefault(lane, ([], self._walk(lane)))
        while not found or (
            (stop := found[-1].stop) is not None and (until is None or stop < until)
        ):
            stage = next(more, None)
            if stage is None:
                break
            found.append(stage)
        return found

    def _walk(self, lane: int) -> Iterator[Stage]:
        """Yield the stages of a lane; after the last one the lane ends, or it has no end."""
        row: int | None = 0
        drawn = np.zeros(len(self.sources), np.int64)
        stage: Stage | None = None
        while row is not None:
            mix = self._mix(lane, row)
            quotas = self._quotas(lane, mix)
            used = [source for source, quota in quotas.items() if drawn[source] >= quota]
            stop = self._next_change(lane, mix, row)
            mixture = self._mixtures.of(mix, row, stop, used)
            if mixture is None:
                return
            stage = self._stage(lane, row, *mixture, drawn, stage)
            stage = stage._replace(stop=stage.first_end(quotas, stop))
            yield stage
            row = stage.stop
            if row is not None:
                drawn = stage.drawn_until(row)

    def _stage(
        self,
        lane: int,
        row: int,
        pattern: Pattern,
        columns: NDArray[np.int32],
        drawn: Ints,
        before: Stage | None,
    ) -> Stage:
        # Where the last pattern was left: one that always began at the same place would prefer
        # what comes first in it, and the steps of a short ramp have few rows.
        turn = self._phase(lane, pattern) if before is None else before.turn_at(row, pattern)
        # Units begin at multiples of their size, as batches do.
        entry = turn * self.unit + row % self.unit
        return begin_stage(row, pattern, entry, columns, drawn, self.unit)

    def _name(self, source: int) -> str:
        return self.gone[-1 - source] if source < 0 else self._lines[source].order.uid

    def _mix(self, lane: int, row: int | None) -> Mix:
        """Return the mix at a row of a lane; None is the end of time."""
        changes = self.changes.get(lane, ())
        return self.mixes[len(changes) if row is None else bisect_right(changes, row)]

    def _next_change(self, lane: int, mix: Mix, row: int) -> int | None:
        """Return the first row behind `row` at which the schedule or the mix changes."""
        knots = self._knots[id(mix)]
        rows = [*knots[bisect_right(knots, row) :][:1], *self.changes.get(lane, ())]
        return min((each for each in rows if each > row), default=None)

    def _quotas(self, lane: int, mix: Mix) -> dict[int, int]:
        """Return how many draws the lane has of each source with a limit."""
        return {
            source: self._order.quota(lane, source, self._limit(source, limit))
            for source, limit in mix.limits.items()
            if source >= 0
        }

    def _limit(self, source: int, epochs: float) -> int:
        return max(1, round(epochs * self._lines[source].length))

    def _phase(self, lane: int, pattern: Pattern) -> int:
        lanes = np.array([self.lanes])
        key = np.array([derive_seed(self.seed, "phase")], np.uint64)
        return int(permute(np.array([lane]), lanes, key)[0]) * pattern.size // self.lanes

    @cached_property
    def _ends(self) -> bool:
        return any(mix.limits for mix in self.mixes)

    @cached_property
    def _clock(self) -> Clock:
        return Clock(self.lanes, self.batch_size)

    @cached_property
    def _knots(self) -> dict[int, list[int]]:
        # No unit is cut by a change of weights.
        return {
            id(mix): sorted({-(-row // self.unit) * self.unit for row in mix.knots(self._clock)})
            for mix in self.mixes
        }

    @cached_property
    def _is_plain(self) -> bool:
        """Whether each source is the leaf of the same number, as it is."""
        return self.sources == tuple((number,) for number in range(len(self.leaves))) and all(
            leaf.repetitions == 1 for leaf in self.leaves
        )

    @cached_property
    def _lines(self) -> list[Line]:
        lines = [tuple(self.leaves[leaf] for leaf in source) for source in self.sources]
        return [Line(leaves, self.seed) for leaves in lines]

    @cached_property
    def _parts(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The source of each leaf, and which part of it the leaf is."""
        source = np.zeros(len(self.leaves), np.int32)
        share = np.zeros(len(self.leaves))
        for number, leaves in enumerate(self.sources):
            source[list(leaves)] = number
            share[list(leaves)] = self._lines[number].shares
        return source, share

    @cached_property
    def _mixtures(self) -> Mixtures:
        return Mixtures(self._name, self._clock, self.seed)

    @cached_property
    def _order(self) -> LeafOrder:
        orders = [line.order for line in self._lines]
        return LeafOrder(orders, lanes=self.lanes, seed=self.seed)

    @cached_property
    def _found(self) -> dict[int, tuple[list[Stage], Iterator[Stage]]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
