"""Divide lengths into bins of limited room: pure functions on integers.

Lengths may have several dimensions, e.g. tokens and image tiles; each has a room of its own.
All functions return lists of indices, one list for each bin, and put every item into one bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
"""(num_items, num_dimensions), none negative and none beyond the room of a bin."""

Bins = list[list[int]]


def first_fit_decreasing(lengths: Lengths, room: Sequence[int]) -> Bins:
    """Put each item, the largest first, into the first bin that has room for it.

    The size of an item is its share of the room, in the dimension where that is largest.

    Example:
        >>> import numpy as np
        >>> first_fit_decreasing(np.array([[6], [5], [4], [3]]), room=[10])
        [[0, 2], [1, 3]]
    """
    bins: Bins = []
    # Bins that are not in use yet have room for everything, so there is always one that fits.
    free = np.tile(np.array(room, np.int64), (len(lengths), 1))
    single = free[:, 0] if len(room) == 1 else None
    for item in _largest_first(lengths, room):
        if single is not None:
            fits = single[: len(bins) + 1] >= lengths[item, 0]
        else:
            fits = (free[: len(bins) + 1] >= lengths[item]).all(axis=1)
        chosen = int(fits.argmax())
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        free[chosen] -= lengths[item]
    return bins


def fill_exactly(
    lengths: Lengths, room: Sequence[int], *, balance: bool = False, oldest_first: bool = False
) -> Bins:
    """Fill one bin after the other with the items that leave the least room in it.

    A bin begins with the largest item left. For one dimension the rest is the subset of the
    items left whose sum comes closest to the room, found by dynamic programming over sums; for
    several, items are added one by one, those first that use what is left in proportion.

    Args:
        lengths: Sizes of the items.
        room: Sizes of a bin.
        balance: Whether bins shall also have similar sums of squares of the first dimension,
            which is what attention costs.
        oldest_first: Whether the first bin takes the items that come first, whatever their
            size, so that none waits for ever if it is carried from window to window.

    Example:
        >>> import numpy as np
        >>> fill_exactly(np.array([[7], [4], [4], [3]]), room=[11])
        [[0, 1], [2, 3]]
    """
    left = _largest_first(lengths, room)
    bins: Bins = []
    squares = _Squares(lengths[:, 0], room[0]) if balance else None
    while left:
        order = sorted(left) if oldest_first and not bins else left
        seed, *rest = order
        if len(room) == 1:
            if squares is not None:
                rest = squares.order(seed, rest)
            added = _closest_subset(lengths[:, 0], rest, int(room[0] - lengths[seed, 0]))
        else:
            added = _in_proportion(lengths, rest, np.array(room) - lengths[seed])
        bins.append([seed, *added])
        if squares is not None:
            squares.take(bins[-1])
        taken = set(bins[-1])
        left = [item for item in left if item not in taken]
    return bins


class _Squares:
    """Steers bins towards the same sum of squared lengths."""

    def __init__(self, lengths: NDArray[np.int64], room: int) -> None:
        self.lengths = lengths.astype(np.float64)
        self.room = room
        self.total = float((self.lengths**2).sum())
        self.tokens = float(self.lengths.sum())

    def order(self, seed: int, rest: list[int]) -> list[int]:
        """Return `rest`, those first that would give the bin of `seed` its share of squares.

        Items of length a fill t tokens with squares of a·t, so with t tokens free and q squares
        due, items of the length q/t are wanted.
        """
        share = self.total * self.room / max(self.tokens, 1.0)
        length = self.lengths[seed]
        wanted = (share - length**2) / max(self.room - length, 1.0)
        distances = np.abs(self.lengths[rest] - wanted)
        return [rest[place] for place in np.argsort(distances, kind="stable").tolist()]

    def take(self, items: list[int]) -> None:
        """Note that a bin was made of `items`."""
        self.total -= float((self.lengths[items] ** 2).sum())
        self.tokens -= float(self.lengths[items].sum())


def _closest_subset(lengths: NDArray[np.int64], items: list[int], room: int) -> list[int]:
    """Return the subset of `items` with the largest sum within `room`; earlier ones first.

    Bit s of an integer says whether the sum s can be reached; adding an item is a shift.
    """
    mask = (1 << (room + 1)) - 1
    reached = 1
    before: list[tuple[int, int]] = []
    values = lengths[items].tolist()
    for item, length in zip(items, values, strict=True):
        if length > room:
            continue
        after = (reached | (reached << length)) & mask
        if after != reached:
            before.append((item, reached))
            reached = after
            if reached >> room:
                break
    target = reached.bit_length() - 1
    chosen = []
    for item, without in reversed(before):
        if not (without >> target) & 1:
            chosen.append(item)
            target -= int(lengths[item])
    return chosen[::-1]


def _in_proportion(lengths: Lengths, items: list[int], free: NDArray[np.int64]) -> list[int]:
    """Return items that fit into `free`, each time the one that lies best in what is left."""
    chosen: list[int] = []
    candidates = np.array(items, np.int64)
    while len(candidates):
        candidates = candidates[(lengths[candidates] <= free).all(axis=1)]
        if not len(candidates):
            break
        share = lengths[candidates] / np.maximum(free, 1)
        # The item that brings the fullest dimension furthest, without leaving the others behind.
        score = share.sum(axis=1) - (share.max(axis=1) - share.min(axis=1))
        best = int(np.argmax(score))
        chosen.append(int(candidates[best]))
        free = free - lengths[candidates[best]]
        candidates = np.delete(candidates, best)
    return chosen


def _largest_first(lengths: Lengths, room: Sequence[int]) -> list[int]:
    share: NDArray[Any] = (lengths / np.array(room)).max(axis=1)
    order: list[int] = np.argsort(-share, kind="stable").tolist()
    return order
