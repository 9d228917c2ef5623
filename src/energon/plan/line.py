"""Lay leaves end to end: in order for validation, permuted as one line for epochized blends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.plan.leaves.leaf import MAX_BLOCKS, PlanLeaf, block_sizes, even_sizes
from energon.plan.leaves.leaf_order import Era, LeafOrder, find_draw
from energon.plan.randomness import combine, derive_seed
from energon.plan.rows import LanesAreStreams, Rows, dealt_rows

NAME_JOINT = " + "
"""What joins the names of the leaves of a line."""


@dataclass(frozen=True)
class Line:
    """Some leaves end to end, each `repetitions` times.

    A fraction of a pass is a run of consecutive samples that begins elsewhere in every epoch.

    Args:
        leaves: At least one.
        seed: Seed of the run.
    """

    leaves: tuple[PlanLeaf, ...]
    seed: int = 0

    @cached_property
    def length(self) -> int:
        """Samples of the whole line."""
        return int(self._bounds[-1])

    @cached_property
    def order(self) -> PlanLeaf:
        """The line as a single leaf, which determines its order."""
        if len(self.leaves) == 1 and self.leaves[0].repetitions == 1:
            return self.leaves[0]
        shuffled = any(leaf.shuffle_over_epochs is not None for leaf in self.leaves)
        order = PlanLeaf(
            uid=NAME_JOINT.join(leaf.uid for leaf in self.leaves),
            num_samples=self.length,
            slice_samples=min(leaf.slice_samples for leaf in self.leaves),
            parallel_slices=max(leaf.parallel_slices for leaf in self.leaves),
            shuffle_over_epochs=1 if shuffled else None,
        )
        if (blocks := self._blocks) is None:
            return order
        # Windows are as long as for the leaf with the longest blocks, which are then read once.
        longest = max(self.leaves, key=lambda leaf: leaf.slice_samples)
        return replace(
            order,
            slice_samples=longest.slice_samples,
            parallel_slices=longest.parallel_slices,
            blocks=blocks,
        )

    @property
    def _blocks(self) -> tuple[int, ...] | None:
        """The blocks of the line; None if no leaf has any, or they are too many."""
        if all(leaf.blocks is None for leaf in self.leaves):
            return None
        lengths = np.diff(self._bounds).tolist()
        passes = [ceil(leaf.repetitions) for leaf in self.leaves]
        counts = [
            len(leaf.blocks or range(0, leaf.num_samples, leaf.slice_samples))
            for leaf in self.leaves
        ]
        if sum(map(mul, passes, counts)) > MAX_BLOCKS:
            return None
        sizes: list[int] = []
        for leaf, length, number in zip(self.leaves, lengths, passes, strict=True):
            own = leaf.blocks or even_sizes(leaf.num_samples, leaf.slice_samples)
            edges = np.cumsum([0, *own * number])
            sizes += block_sizes(np.minimum(edges, length)) or ()
        return tuple(sizes)

    def at(self, passes: Ints, positions: Ints) -> Rows:
        """Return the samples at `positions` of the line in some of its passes, elementwise."""
        if len(self.leaves) == 1 and self.leaves[0].repetitions == 1:
            return Rows(np.zeros(len(positions), np.int32), passes, positions)
        leaf = (np.searchsorted(self._bounds, positions, side="right") - 1).astype(np.int32)
        pass_, ordinal = np.divmod(positions - self._bounds[leaf], self._sizes[leaf])
        if self._fractions.any():
            partial = (pass_ == self._passes[leaf]) & self._fractions[leaf]
            sizes = self._sizes[leaf].astype(np.uint64)
            rotation = (combine(self._keys[leaf], passes) % sizes).astype(np.int64)
            ordinal = np.where(partial, (ordinal + rotation) % self._sizes[leaf], ordinal)
        return Rows(leaf, passes * self._epochs[leaf] + pass_, ordinal)

    @cached_property
    def shares(self) -> NDArray[np.float64]:
        """The part of the line that each leaf takes."""
        return np.diff(self._bounds) / self.length

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the pass and position of a sample in an epoch of its leaf.

        None if a fraction of the leaf is all that comes then, and it is not among that.
        """
        if len(self.leaves) == 1 and self.leaves[0].repetitions == 1:
            return epoch, ordinal
        size = int(self._sizes[leaf])
        line, pass_ = divmod(epoch, int(self._epochs[leaf]))
        if self._fractions[leaf] and pass_ == self._passes[leaf]:
            rotation = int(combine(self._keys[leaf : leaf + 1], line)[0] % np.uint64(size))
            ordinal = (ordinal - rotation) % size
        position = int(self._bounds[leaf]) + pass_ * size + ordinal
        return (line, position) if position < int(self._bounds[leaf + 1]) else None

    @cached_property
    def _sizes(self) -> Ints:
        return np.array([leaf.num_samples for leaf in self.leaves], np.int64)

    @cached_property
    def _passes(self) -> Ints:
        return np.array([int(leaf.repetitions) for leaf in self.leaves], np.int64)

    @cached_property
    def _epochs(self) -> Ints:
        return np.array([ceil(leaf.repetitions) for leaf in self.leaves], np.int64)

    @cached_property
    def _fractions(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self._epochs > self._passes

    @cached_property
    def _bounds(self) -> Ints:
        lengths = [max(1, round(leaf.num_samples * leaf.repetitions)) for leaf in self.leaves]
        return np.concatenate(([0], np.cumsum(np.array(lengths, np.int64))))

    @cached_property
    def _keys(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        seeds = [derive_seed(self.seed, "fraction", leaf.uid) for leaf in self.leaves]
        return np.array(seeds, np.uint64)

    def __getstate__(self) -> dict[str, object]:
        return {"leaves": self.leaves, "seed": self.seed}


@dataclass(frozen=True)
class LinePlan(LanesAreStreams):
    """The plan of one line.

    Args:
        leaves: What it is made of.
        lanes: V.
        seed: Seed of the run.
        repeat: Whether the line starts again at its end.
        shuffle: Whether the line is permuted, with the locality of leaves.
        stripe: If it is not, how many consecutive samples go to the same lane.
        eras: What went before with other lanes; the line is their only leaf.
        pass_number: How many passes over a line that does not repeat there were before.
    """

    leaves: tuple[PlanLeaf, ...]
    lanes: int
    seed: int = 0
    repeat: bool = False
    shuffle: bool = False
    stripe: int = 1
    eras: tuple[Era, ...] = ()
    pass_number: int = 0

    @property
    def length(self) -> int:
        """Samples of the whole line."""
        return self._line.length

    def num_rows(self, lane: int) -> int | None:
        """Return how many rows a lane has; None if the line repeats."""
        if self.repeat:
            return None
        stripe = 1 if self.shuffle else self.stripe
        return dealt_rows(self.length - self._before, lane, self.lanes, stripe)

    def with_changes(self, lane: int, rows: tuple[int, ...]) -> LinePlan:
        """Return this plan, since a line has no mix that could change."""
        return self

    def rows(self, lane: int, start: int, count: int) -> Rows:
        """Return rows `start` to `start + count` of a lane; fewer only at the end."""
        end = self.num_rows(lane)
        stop = start + count if end is None else min(start + count, end)
        return self.at(lane, np.arange(start, max(start, stop), dtype=np.int64))

    def at(self, lane: int, rows: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples at `rows` of a lane, in any order; a line has no gaps."""
        return self.samples(*self.numbers(lane, rows))

    def samples(self, source: NDArray[np.int32], numbers: Ints, *, gaps: bool = False) -> Rows:
        """Return the samples of draws from the line."""
        if self.shuffle:
            line, position = self._order.at(source, numbers)
        else:
            line, position = np.divmod(numbers, self.length)
            line = line + self.pass_number
        return self._line.at(line, position)

    def leaf_of(self, lane: int, rows: Ints) -> NDArray[np.int32]:
        """Return the leaf of each of `rows` of a lane."""
        return self.at(lane, rows).leaf

    def numbers(self, lane: int, rows: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Return the source of each row, which is the line, and the number of the draw from it."""
        source = np.zeros(len(rows), np.int32)
        if self.shuffle:
            return source, self._order.numbers(lane, source, rows)
        return source, self._position(lane, rows)

    def drawn(self, lane: int, row: int) -> Ints:
        """Return how often each source, that is the line, comes in the rows of a lane before."""
        return np.array([row], np.int64)

    def quota(self, lane: int, source: int, total: int) -> int:
        """Return how many of the first `total` draws from the line are those of a lane."""
        if self.shuffle:
            return self._order.quota(lane, source, total)
        return dealt_rows(total - self._before, lane, self.lanes, self.stripe)

    def leaf_counts(self, lane: int, row: int) -> NDArray[np.float64]:
        """Return how often each leaf comes in the rows of a lane before `row`."""
        if self.shuffle:
            return self._line.shares * row
        passes, rest = divmod(self._position(lane, row), self.length)
        edges = np.minimum(np.cumsum([0, *self._line.shares]) * self.length, rest)
        # Of the passes before, a lane has its part of each leaf; of this one, what it has read.
        before = self._line.shares * (passes * self.length)
        counts: NDArray[np.float64] = before + np.diff(edges)
        counts *= row / max(1, passes * self.length + rest)
        return counts

    def find(self, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
        """Return the lane and row of a sample in an epoch of its leaf, or None."""
        position = self._line.find(leaf, epoch, ordinal)
        if position is None:
            return None
        if self.shuffle:
            drawn = find_draw(self._order, 0, *position)
            if drawn is None:
                return None
            lane, row = drawn
        else:
            number = (position[0] - self.pass_number) * self.length + position[1] - self._before
            if number < 0:
                return None
            stripe, within = divmod(number, self.stripe)
            turn, lane = divmod(stripe, self.lanes)
            row = turn * self.stripe + within
        end = self.num_rows(lane)
        return (lane, row) if end is None or row < end else None

    def _position(self, lane: int, rows: Any) -> Any:
        """Return the positions on the endless line of rows of a lane, for lines in order."""
        turn, within = np.divmod(rows, self.stripe)
        return (turn * self.lanes + lane) * self.stripe + within + self._before

    @property
    def _before(self) -> int:
        """Samples that were drawn in earlier eras."""
        return self.eras[-1].draws[0] if self.eras else 0

    @cached_property
    def _line(self) -> Line:
        return Line(self.leaves, self.seed)

    @cached_property
    def _order(self) -> LeafOrder:
        line = replace(self._line.order, shuffle_over_epochs=1)
        first = (self.pass_number,)
        return LeafOrder((line,), lanes=self.lanes, seed=self.seed, eras=self.eras, first=first)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
