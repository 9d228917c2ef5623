"""The order in which the samples of a leaf are drawn, and the draw that yields a sample.

The k-th draw of lane v is draw number K = k·V + v of the leaf. With n samples, K // n is its
epoch and p = K % n its position there; each finished epoch holds every position once, so it
is enough to say which sample stands at a position, by a permutation of n that keeps lanes
reading consecutive samples:

- Columns. A lane meets the positions p with p ≡ const (mod V), so positions are seen as rows
  i = p // V of V columns c = p % V.
- Slices. The line of samples is cut into slices of L. The i // L-th slice of column c is
  chosen by a permutation of all slices.
- Windows. Within a column, the rows of S consecutive slices are permuted, so at most S slices
  are open at a time.
- Rests. What does not fill a slice in every column is dealt as V shorter slices, what does not
  fill a row singly, each by permutations of their own.
- Rotation. The line begins at a random sample in every epoch, so slices are cut elsewhere.

If samples are in blocks that are decoded as a whole, slices are these blocks: see `BlockLine`.

Everything is computed element by element on arrays, for draws of many leaves at once.

A run may continue with another number of lanes (`Era`). Then draw numbers continue where they were,
K = D + k·V + v, and an epoch that has begun keeps its columns, so it is not permuted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import U64, Ints, distinct
from energon.errors import ConfigError
from energon.plan.leaves.leaf import MAX_BLOCKS, WITH_REPLACEMENT, BlockLine, PlanLeaf, pieces_of
from energon.plan.randomness import (
    combine,
    derive_seed,
    divided,
    permute,
    picked,
    shared,
    unpermuted,
)
from energon.plan.rows import dealt_rows


class Era(NamedTuple):
    """A part of a run in which its lanes did not change; another one followed."""

    draws: tuple[int, ...]
    """How often each leaf had been drawn from at its end, since the run began."""
    lanes: int


class LeafOrder:
    """The order of draws from some leaves, all at once.

    Args:
        leaves: The leaves.
        lanes: V.
        seed: Seed of the run.
        eras: What went before with other lanes.
        first: For each leaf, the number of the pass with which draw 0 begins; () for 0.
    """

    def __init__(
        self,
        leaves: Sequence[PlanLeaf],
        *,
        lanes: int,
        seed: int,
        eras: Sequence[Era] = (),
        first: Sequence[int] = (),
    ) -> None:
        self.leaves = tuple(leaves)
        self.lanes = lanes
        self.seed = seed
        self.eras = tuple(eras)
        self.first = np.array(first or [0] * len(self.leaves), np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("leaves", "lanes", "seed", "eras", "first")}

    def numbers(self, lane: int, leaf: NDArray[np.int32], draws: Ints) -> Ints:
        """Return the numbers, among all draws from a leaf, of draws by a lane, elementwise."""
        table, lanes = self.table, self.lanes
        numbers = draws * lanes + lane
        if table.keeps_order.any():
            # Runs of samples are dealt to the lanes in turn.
            turn, within = np.divmod(draws, table.slice_samples[leaf])
            runs = (turn * lanes + lane) * table.slice_samples[leaf] + within
            numbers = np.where(table.keeps_order[leaf], runs, numbers)
        return numbers + table.before[leaf] if self.eras else numbers

    def lane_of(self, leaf: int, number: int) -> tuple[int, int] | None:
        """Return the lane that makes draw `number` of a leaf, and the number among its own draws.

        None if it was made before the run had these lanes.
        """
        run = int(self.table.slice_samples[leaf]) if self.table.keeps_order[leaf] else 1
        number -= int(self.table.before[leaf])
        if number < 0:
            return None
        turn, within = divmod(number, run)
        turn, lane = divmod(turn, self.lanes)
        return lane, turn * run + within

    def at(self, leaf: NDArray[np.int32], numbers: Ints) -> tuple[Ints, Ints]:
        """Return epoch and ordinal of draws from leaves by their numbers, elementwise."""
        methods = self._shuffled, self._replaced, self._in_order
        leaf = shared(leaf)
        kind = shared(self.table.kind[leaf])
        if len(kind) == 1:
            return methods[kind[0]](leaf, numbers)
        epoch = np.empty(len(leaf), np.int64)
        ordinal = np.empty(len(leaf), np.int64)
        for number, method in enumerate(methods):
            chosen = np.flatnonzero(kind == number)
            if len(chosen):
                epoch[chosen], ordinal[chosen] = method(leaf[chosen], numbers[chosen])
        return epoch, ordinal

    def quota(self, lane: int, leaf: int, total: int) -> int:
        """Return how many of the first `total` draws from `leaf` are those of `lane`."""
        table = self.table
        run = int(table.slice_samples[leaf]) if table.keeps_order[leaf] else 1
        return dealt_rows(total - int(table.before[leaf]), lane, self.lanes, run)

    def lanes_of(self, leaf: int, pass_: int) -> int:
        """Return how many lanes there were when a pass over a leaf began."""
        for era in self.eras:
            if pass_ * int(self.table.size[leaf]) < era.draws[leaf]:
                return era.lanes
        return self.lanes

    def _shuffled(self, leaf: NDArray[np.int32], numbers: Ints) -> tuple[Ints, Ints]:
        table = self.table
        size = table.size[leaf]
        pass_, position = divided(numbers, size)
        numbered = self._numbered(leaf, pass_)
        keys = combine(table.key[leaf], shared(numbered))
        line_index = np.empty(len(position), np.int64)
        for of_pass, chosen in self._tables_of(leaf, pass_ * size):
            some = picked(leaf, chosen), position[chosen], picked(keys, chosen)
            line_index[chosen] = _line_indices(of_pass, *some)
        # One pass over m copies is m epochs.
        copy, ordinal = divided(line_index, table.num_samples[leaf])
        return numbered * table.copies[leaf] + copy, ordinal

    def _tables_of(
        self, leaf: NDArray[np.int32], begin: Ints
    ) -> Iterator[tuple[LeafTable, slice | Ints]]:
        """Yield the tables as they were when passes began, and the draws of these passes.

        Args:
            leaf: The leaf of each draw.
            begin: The number of the first draw of its pass.
        """
        if not self.eras or (begin >= self.table.before[leaf]).all():
            yield self.table, slice(None)
            return
        left = np.ones(len(begin), np.bool_)
        for era in (*self.eras, None):
            begun = left if era is None else left & (begin < np.array(era.draws)[leaf])
            chosen = np.flatnonzero(begun)
            if len(chosen):
                yield self.table if era is None else self._table_of(era.lanes), chosen
                left &= ~begun

    def _replaced(self, leaf: NDArray[np.int32], numbers: Ints) -> tuple[Ints, Ints]:
        table = self.table
        size, length = table.num_samples[leaf], table.slice_samples[leaf]
        keys = table.key[leaf]
        if self.first.any():
            keys = combine(keys, self.first[leaf])
        window_rows = length * table.parallel[leaf]
        row, column = np.divmod(numbers, self.lanes)
        window, inner = np.divmod(row, window_rows)
        inner = permute(inner, window_rows, combine(keys, WINDOW, column, window))
        slice_ = (window * window_rows + inner) // length
        start = (combine(keys, SLICE, column, slice_) % size.astype(np.uint64)).astype(np.int64)
        steps = inner % length
        ordinal = (start + steps) % size
        for number, line in table.lines.items():
            chosen = np.flatnonzero(np.broadcast_to(leaf, start.shape) == number)
            ordinal[chosen] = line.within(start[chosen], steps[chosen])
        return self._numbered(leaf, numbers // size), ordinal

    def _in_order(self, leaf: NDArray[np.int32], numbers: Ints) -> tuple[Ints, Ints]:
        epoch, ordinal = np.divmod(numbers, self.table.num_samples[leaf])
        return self._numbered(leaf, epoch), ordinal

    def _numbered(self, leaf: NDArray[np.int32], passes: Ints) -> Ints:
        """Return the numbers of passes in the run, of which draw 0 need not begin the first."""
        return passes + self.first[leaf] if self.first.any() else passes

    @cached_property
    def table(self) -> LeafTable:
        """The leaves as arrays."""
        return self._table_of(self.lanes)

    def table_of_pass(self, leaf: int, pass_: int) -> LeafTable:
        """Return the leaves as arrays, as they were when a pass over one of them began."""
        return self._table_of(self.lanes_of(leaf, pass_))

    def _table_of(self, lanes: int) -> LeafTable:
        table = self._tables.get(lanes)
        if table is None:
            before = self.eras[-1].draws if self.eras else ()
            table = self._tables[lanes] = LeafTable(self.leaves, lanes, self.seed, before)
        return table

    @cached_property
    def _tables(self) -> dict[int, LeafTable]:
        return {}


SHUFFLED, REPLACED, IN_ORDER = range(3)
WINDOW, SLICE, REST, SINGLE, ROTATION = range(5)


class LeafTable:
    """The properties of all leaves as arrays."""

    def __init__(
        self, leaves: Sequence[PlanLeaf], lanes: int, seed: int, before: Sequence[int]
    ) -> None:
        self.lanes = lanes
        self.before = np.array(before or [0] * len(leaves), np.int64)
        multipliers = [leaf.shuffle_over_epochs for leaf in leaves]
        self.kind = np.array(
            [
                IN_ORDER if m is None else REPLACED if m == WITH_REPLACEMENT else SHUFFLED
                for m in multipliers
            ]
        )
        self.num_samples = np.array([leaf.num_samples for leaf in leaves], np.int64)
        self.copies = np.array([max(1, m or 1) for m in multipliers], np.int64)
        self.size = self.num_samples * self.copies
        self.key = np.array([derive_seed(seed, "leaf", leaf.uid) for leaf in leaves], np.uint64)
        self.parallel = np.array([leaf.parallel_slices for leaf in leaves], np.int64)
        requested = np.array([leaf.slice_samples for leaf in leaves], np.int64)
        # A small leaf is cut finer, so that every lane still mixes all its open slices.
        rows = self.size // lanes
        fits = np.maximum(1, np.where(rows < 8, 1, rows // self.parallel))
        self.slice_samples = np.where(
            self.kind == SHUFFLED,
            np.minimum(requested, fits),
            np.minimum(requested, self.num_samples),
        )
        self.sliced_rows = rows // self.slice_samples * self.slice_samples
        self.keeps_order = self.kind == IN_ORDER
        self.lines = {
            number: BlockLine(sizes)
            for number, leaf in enumerate(leaves)
            if (sizes := self._blocks(number, leaf)) is not None
        }
        self.has_lines = np.array([number in self.lines for number in range(len(leaves))])

    def _blocks(self, number: int, leaf: PlanLeaf) -> Ints | None:
        """Return the sizes of the blocks that the slices of a leaf follow; None for none."""
        if leaf.blocks is None or self.keeps_order[number]:
            return None
        copies, sizes = int(self.copies[number]), np.array(leaf.blocks, np.int64)
        least = self.lanes * min(leaf.parallel_slices, MIXED_BLOCKS)
        if self.kind[number] == SHUFFLED and len(sizes) * copies < least:
            sizes = pieces_of(sizes, max(1, int(self.size[number]) // least))
        return np.tile(sizes, copies) if len(sizes) * copies <= MAX_BLOCKS else None


def _line_indices(table: LeafTable, leaf: NDArray[np.int32], position: Ints, keys: U64) -> Ints:
    """Return the index on the line of samples of each position in a pass."""
    if table.lines:
        in_blocks = table.has_lines[leaf]
        if in_blocks.all():
            return _line_indices_in_blocks(table, leaf, position, keys)
        if in_blocks.any():
            line_index = np.empty(len(position), np.int64)
            for chosen in np.flatnonzero(in_blocks), np.flatnonzero(~in_blocks):
                own = picked(leaf, chosen), position[chosen], picked(keys, chosen)
                line_index[chosen] = _line_indices(table, *own)
            return line_index
    lanes, size = table.lanes, table.size[leaf]
    length, sliced = table.slice_samples[leaf], table.sliced_rows[leaf]
    row, column = divided(position, lanes)
    window_rows = length * table.parallel[leaf]
    window = row // window_rows
    begin = window * window_rows
    stop, mixed = np.minimum(begin + window_rows, sliced), length > 1
    in_rest = row >= sliced
    if has_rest := bool(in_rest.any()):
        # The rows that fill no slice are permuted together. The last, incomplete one is not.
        begin = np.where(in_rest, sliced, begin)
        stop = np.where(in_rest, size // lanes, stop)
        is_single = row >= size // lanes
        mixed = mixed & ~is_single
    inner, column = row - begin, shared(column)
    if mixed.any():
        mixable = slice(None) if mixed.all() else np.flatnonzero(mixed)
        numbers = WINDOW, picked(column, mixable), shared(picked(window, mixable))
        inner[mixable] = permute(
            inner[mixable], picked(stop - begin, mixable), combine(picked(keys, mixable), *numbers)
        )
    slice_row, within = divided(begin + inner, length)
    number, count = slice_row * lanes + column, sliced // length * lanes
    width: Ints = length
    base: Ints | int = 0
    purpose: Ints | int = SLICE
    if has_rest:
        # One shorter slice a column, behind the others, and behind these single samples.
        kinds = [is_single, in_rest]
        number = np.where(in_rest, column, number)
        within = np.select(kinds, [0, inner], within)
        count = np.select(kinds, [size % lanes, lanes], count)
        base = np.select(kinds, [size - size % lanes, sliced * lanes], 0)
        width = np.select(kinds, [1, size // lanes - sliced], length)
        purpose = np.select(kinds, [SINGLE, REST], SLICE)
    slice_ = permute(number, count, combine(keys, purpose))
    rotation = (combine(keys, ROTATION) % size.astype(np.uint64)).astype(np.int64)
    behind: Ints = base + slice_ * width + within + rotation
    return behind - np.where(behind < size, 0, size)


def _line_indices_in_blocks(
    table: LeafTable, leaf: NDArray[np.int32], position: Ints, keys: U64
) -> Ints:
    """Return the index on the line of samples of each position in a pass, for leaves in blocks."""
    row, column = divided(position, table.lanes)
    rows, rest = divided(table.size[leaf], table.lanes)
    window_rows = table.slice_samples[leaf] * table.parallel[leaf]
    window = row // window_rows
    begin = window * window_rows
    span = np.minimum(window_rows, rows + (column < rest) - begin)
    mixed = combine(keys, WINDOW, shared(column), shared(window))
    line_index = (
        column * rows + np.minimum(column, rest) + begin + permute(row - begin, span, mixed)
    )
    passes = shared(combine(keys, SLICE))
    if len(passes) == 1:
        return table.lines[int(leaf[0])].samples_at(line_index, int(passes[0]))
    leaf = np.broadcast_to(leaf, line_index.shape)
    for key in distinct(passes):
        chosen = np.flatnonzero(passes == key)
        line_index[chosen] = table.lines[int(leaf[chosen[0]])].samples_at(
            line_index[chosen], int(key)
        )
    return line_index


MIXED_BLOCKS = 4
"""Blocks that a lane reads in each epoch at least; if there are not so many, it reads pieces."""


def find_draw(order: LeafOrder, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
    """Return the lane that draws a sample in an epoch of a leaf, and the number of its draw.

    None if it was drawn before the run had these lanes.

    Raises:
        ConfigError: If samples are drawn with replacement: then there is no such draw.
    """
    n, first = int(order.table.num_samples[leaf]), int(order.first[leaf])
    if order.table.kind[leaf] == REPLACED:
        raise ConfigError(
            f"{order.leaves[leaf].uid} is drawn with replacement, so a sample has no row in an "
            "epoch"
        )
    if order.table.kind[leaf] == IN_ORDER:
        return order.lane_of(leaf, (epoch - first) * n + ordinal)
    pass_, copy = divmod(epoch, int(order.table.copies[leaf]))
    table = order.table_of_pass(leaf, pass_ - first)
    position = _position(table, leaf, pass_, copy * n + ordinal)
    return order.lane_of(leaf, (pass_ - first) * int(table.size[leaf]) + position)


def _position(table: LeafTable, leaf: int, pass_: int, line_index: int) -> int:
    """Return the position in a pass of an index on the line of samples.

    See `LeafOrder` for what the parts of a line are.
    """
    lanes = table.lanes
    size, length = int(table.size[leaf]), int(table.slice_samples[leaf])
    key = combine(table.key[leaf : leaf + 1], pass_)
    if leaf in table.lines:
        return _position_by_block(table, leaf, key, line_index)
    line_index = (line_index - int(combine(key, ROTATION)[0] % np.uint64(size))) % size
    rows, sliced = size // lanes, int(table.sliced_rows[leaf])
    window_rows = length * int(table.parallel[leaf])
    if line_index >= rows * lanes:
        single = unpermuted(line_index - rows * lanes, size % lanes, combine(key, SINGLE))
        return rows * lanes + single
    if line_index >= sliced * lanes:
        chosen, within = divmod(line_index - sliced * lanes, rows - sliced)
        column = unpermuted(chosen, lanes, combine(key, REST))
        row, begin, stop = sliced + within, sliced, rows
    else:
        chosen, within = divmod(line_index, length)
        number = unpermuted(chosen, sliced // length * lanes, combine(key, SLICE))
        slice_row, column = divmod(number, lanes)
        row = slice_row * length + within
        begin = row // window_rows * window_rows
        stop = min(begin + window_rows, sliced)
    if length > 1:
        mixed = combine(key, WINDOW, column, begin // window_rows)
        row = begin + unpermuted(row - begin, stop - begin, mixed)
    return row * lanes + column


def _position_by_block(table: LeafTable, leaf: int, key: U64, line_index: int) -> int:
    """Return the position in a pass of an index on the line of samples, for a leaf in blocks."""
    rows, rest = divmod(int(table.size[leaf]), table.lanes)
    line_index = table.lines[leaf].index_of(line_index, int(combine(key, SLICE)[0]))
    column, row = divmod(line_index, rows + 1)
    if column >= rest:
        column, row = divmod(line_index - rest, rows)
    window_rows = int(table.slice_samples[leaf] * table.parallel[leaf])
    begin = row // window_rows * window_rows
    span = min(window_rows, rows + (column < rest) - begin)
    mixed = combine(key, WINDOW, column, begin // window_rows)
    return (begin + unpermuted(row - begin, span, mixed)) * table.lanes + column
