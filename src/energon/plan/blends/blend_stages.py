"""The stages of the lanes of a blend: where shares change, and the draws until then.

A pattern realises weights almost exactly in every interval. The weights become whole numbers t_d
with sum T, and a pattern of T entries in which the j-th entry of number d lies near (j + u)/t_d
of the way. It is read over and over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, fsum, log2
from threading import RLock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.plan.blends.curve import Clock
from energon.plan.blends.mix import Mix
from energon.plan.leaves.leaf_order import LeafOrder
from energon.plan.line import Line
from energon.plan.randomness import combine, derive_seed, permute

MIN_PATTERN, MAX_PATTERN = 4096, 65536


@dataclass(frozen=True, eq=False)
class Pattern:
    """A repeated pattern of numbers, such as those of sources."""

    number: NDArray[np.int32]
    """What comes, for each entry."""
    rank: Ints
    """How many entries of the same number come before, for each entry."""
    counts: Ints
    """How many entries each number has."""

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self.number)

    def place_of(self, number: int, turn: int) -> int:
        """Return the entry of the repeated pattern with the `turn`-th occurrence of `number`."""
        rounds, rank = divmod(turn, int(self.counts[number]))
        return rounds * self.size + int(self._places[self._starts[number] + rank])

    @cached_property
    def _places(self) -> Ints:
        return np.argsort(self.number, kind="stable")

    @cached_property
    def _starts(self) -> Ints:
        return np.cumsum(self.counts) - self.counts

    def count_until(self, entries: int) -> Ints:
        """Return how often each number occurs in the first `entries` of the repeated pattern."""
        rounds, at = divmod(entries, self.size)
        counts: Ints = np.bincount(self.number[:at], minlength=len(self.counts))
        counts += rounds * self.counts
        return counts


@lru_cache(maxsize=1024)
def make_pattern(weights: tuple[float, ...], seed: int) -> Pattern:
    """Return a pattern that realises `weights`."""
    counts = apportion(weights, _pattern_size(weights))
    number = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(number)) - start
    key = np.array([derive_seed(seed, "pattern")], np.uint64)
    noise = combine(key, number.astype(np.int64), rank)
    jitter = (noise >> np.uint64(11)).astype(np.float64) / (1 << 53)
    order = np.argsort((rank + jitter) / counts[number], kind="stable")
    return Pattern(number[order], rank[order], counts)


def apportion(weights: Sequence[float], total: int) -> Ints:
    """Return whole numbers with sum `total` in proportion to `weights` (largest remainder).

    A weight above 0 gets at least 1.
    """
    shares = np.asarray(weights, np.float64)
    shares = shares / shares.max()
    exact = shares / shares.sum() * total
    counts: Ints = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    starved = (counts == 0) & (shares > 0)
    counts[starved] = 1
    counts[np.argmax(counts)] -= int(starved.sum())
    return counts


def _pattern_size(weights: Sequence[float]) -> int:
    """Return T, a power of 2 large enough for the smallest share to be within a hundredth."""
    smallest = min(weight for weight in weights if weight) / fsum(weights)
    precise = 64 * max(len(weights), min(MAX_PATTERN, 1 / smallest))
    return min(MAX_PATTERN, max(MIN_PATTERN, 1 << ceil(log2(precise))))


Mixture = tuple[Pattern, NDArray[np.int32]]
"""A pattern, and the source that each of its numbers stands for."""


class Mixtures:
    """Patterns by rows, each made once, because thousands of lanes of a run may need the same.

    Args:
        name: Returns the name of a source.
        clock: Tells the rows of positions.
        seed: Seed of the run.
    """

    def __init__(self, name: Callable[[int], str], clock: Clock, seed: int) -> None:
        self._name = name
        self._clock = clock
        self._seed = seed
        self._known: dict[tuple[object, ...], Mixture | None] = {}

    def of(self, mix: Mix, row: int, stop: int | None, used: Sequence[int]) -> Mixture | None:
        """Return the pattern over rows without a change; None if nothing is left to draw.

        Args:
            mix: Shares; kept by the caller for as long as this lives.
            row: First row.
            stop: Row after the last; None for no end.
            used: Sources that are used up.
        """
        key = (id(mix), row, stop, tuple(used))
        if key not in self._known:
            shares = mix.shares(row, stop, self._clock, used)
            self._known[key] = None if shares is None else self._make(mix, shares)
        return self._known[key]

    def _make(self, mix: Mix, shares: Sequence[float]) -> Mixture:
        # By name, so that the order of entries in a document does not matter.
        named = sorted(zip(map(self._name, mix.sources), mix.sources, shares, strict=True))
        pattern = make_pattern(tuple(share for *_, share in named), self._seed)
        return pattern, np.array([source for _, source, _ in named], np.int32)


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
        # What is gone has no base: nobody can ask for its draws.
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
            # rows before a change are what they were when nobody knew of it.
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
        lanes = np.array([self.clock.lanes])
        key = np.array([derive_seed(self.seed, "phase")], np.uint64)
        return int(permute(np.array([lane]), lanes, key)[0]) * pattern.size // self.clock.lanes

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
