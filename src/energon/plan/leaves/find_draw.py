"""Find the draw that yields a sample: the inverse of `LeafOrder`."""

from __future__ import annotations

import numpy as np

from energon.arrays import U64
from energon.errors import ConfigError
from energon.plan.leaves.leaf_order import (
    IN_ORDER,
    REPLACED,
    REST,
    ROTATION,
    SINGLE,
    SLICE,
    WINDOW,
    LeafOrder,
    LeafTable,
)
from energon.plan.randomness import combine, unpermuted


def find_draw(order: LeafOrder, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
    """Return the lane that draws a sample in an epoch of a leaf, and the number of its draw.

    None if it was drawn before the run had these lanes.

    Raises:
        ConfigError: If samples are drawn with replacement: then there is no such draw.
    """
    n, first = int(order.table.num_samples[leaf]), int(order.first[leaf])
    if order.table.kind[leaf] == REPLACED:
        raise ConfigError(
            f"{order.leaves[leaf].uid} is drawn with replacement, so a sample has no place in an "
            "epoch"
        )
    if order.table.kind[leaf] == IN_ORDER:
        return order.lane_of(leaf, (epoch - first) * n + ordinal)
    pass_, copy = divmod(epoch, int(order.table.copies[leaf]))
    table = order.table_of_pass(leaf, pass_ - first)
    position = _position(table, leaf, pass_, copy * n + ordinal)
    return order.lane_of(leaf, (pass_ - first) * int(table.size[leaf]) + position)


def _position(table: LeafTable, leaf: int, pass_: int, place: int) -> int:
    """Return the position in a pass of a place on the line of samples.

    See `LeafOrder` for what the parts of a line are.
    """
    lanes = table.lanes
    size, length = int(table.size[leaf]), int(table.slice_samples[leaf])
    key = combine(table.key[leaf : leaf + 1], pass_)
    if leaf in table.lines:
        return _position_by_block(table, leaf, key, place)
    place = (place - int(combine(key, ROTATION)[0] % np.uint64(size))) % size
    rows, sliced = size // lanes, int(table.sliced_rows[leaf])
    window_rows = length * int(table.parallel[leaf])
    if place >= rows * lanes:
        single = unpermuted(place - rows * lanes, size % lanes, combine(key, SINGLE))
        return rows * lanes + single
    if place >= sliced * lanes:
        chosen, within = divmod(place - sliced * lanes, rows - sliced)
        column = unpermuted(chosen, lanes, combine(key, REST))
        row, begin, stop = sliced + within, sliced, rows
    else:
        chosen, within = divmod(place, length)
        number = unpermuted(chosen, sliced // length * lanes, combine(key, SLICE))
        slice_row, column = divmod(number, lanes)
        row = slice_row * length + within
        begin = row // window_rows * window_rows
        stop = min(begin + window_rows, sliced)
    if length > 1:
        mixed = combine(key, WINDOW, column, begin // window_rows)
        row = begin + unpermuted(row - begin, stop - begin, mixed)
    return row * lanes + column


def _position_by_block(table: LeafTable, leaf: int, key: U64, place: int) -> int:
    """Return the position in a pass of a place on the line of samples, for a leaf in blocks."""
    rows, rest = divmod(int(table.size[leaf]), table.lanes)
    place = table.lines[leaf].place_of(place, int(combine(key, SLICE)[0]))
    column, row = divmod(place, rows + 1)
    if column >= rest:
        column, row = divmod(place - rest, rows)
    window_rows = int(table.slice_samples[leaf] * table.parallel[leaf])
    begin = row // window_rows * window_rows
    span = min(window_rows, rows + (column < rest) - begin)
    mixed = combine(key, WINDOW, column, begin // window_rows)
    return (begin + unpermuted(row - begin, span, mixed)) * table.lanes + column
