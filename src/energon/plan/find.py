"""When a sample is drawn: the order of a leaf, backwards, at the same cost for any epoch."""

from __future__ import annotations

import numpy as np

from energon.errors import ConfigError
from energon.plan.leaf import (
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
from energon.plan.permutation import unpermute
from energon.plan.seeds import U64, combine


def find_draw(order: LeafOrder, leaf: int, epoch: int, ordinal: int) -> tuple[int, int] | None:
    """Return which lane draws a sample in an epoch of a leaf, and with which of its draws.

    None if it was drawn before the run had these lanes.

    Raises:
        ConfigError: If samples are drawn with replacement: then there is no such draw.
    """
    n = int(order.table.num_samples[leaf])
    if order.table.kind[leaf] == REPLACED:
        raise ConfigError(
            f"{order.leaves[leaf].uid} is drawn with replacement, so a sample has no place in an "
            "epoch"
        )
    if order.table.kind[leaf] == IN_ORDER:
        return order.lane_of(leaf, epoch * n + ordinal)
    pass_, copy = divmod(epoch, int(order.table.copies[leaf]))
    table = order.table_of_pass(leaf, pass_)
    position = _position(table, leaf, pass_, copy * n + ordinal)
    return order.lane_of(leaf, pass_ * int(table.size[leaf]) + position)


def unpermuted(image: int, size: int, key: U64) -> int:
    """Return which of `size` numbers goes to `image` in the permutation of `key`."""
    return int(unpermute(np.array([image]), np.array([size]), key)[0])


def _position(table: LeafTable, leaf: int, pass_: int, place: int) -> int:
    """Return at which position of a pass a place on the line of samples stands.

    See `LeafOrder` for what the parts of a line are.
    """
    lanes = table.lanes
    size, length = int(table.size[leaf]), int(table.slice_samples[leaf])
    key = combine(table.key[leaf : leaf + 1], pass_)
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
