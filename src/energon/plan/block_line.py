"""Samples in blocks that are decoded as a whole, such as row groups, in an order by block.

In each pass over a leaf, its blocks are laid end to end in an order of their own, and each lane has
one stretch of that line. So a block is read by one lane, or by two where their stretches meet, and
within a lane its samples are close together. If a lane would read very few blocks in an epoch, they
are cut into pieces first, so that it mixes more of them.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from energon.arrays import Ints
from energon.plan.permutation import permute

MAX_BLOCKS = 1 << 18
"""Above this number, sorting the blocks of a pass would be felt: slices do not follow them."""
KEPT_PASSES = 4
"""Lanes of a leaf are in a few passes at a time: some have begun the next one."""


class BlockLine:
    """The blocks of a leaf, in the order of each pass.

    Args:
        sizes: The number of samples of each block, in the order of the samples.
    """

    def __init__(self, sizes: Ints) -> None:
        self._edges = np.concatenate(([0], np.cumsum(sizes)))
        self._passes: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()

    def samples_at(self, places: Ints, key: int) -> Ints:
        """Return the samples at some places on the line of a pass with a key."""
        order, begins = self._pass(key)
        at = np.searchsorted(begins, places, side="right") - 1
        return np.asarray(self._edges[order[at]] + places - begins[at])

    def place_of(self, sample: int, key: int) -> int:
        """Return the place of a sample on the line of a pass with a key."""
        order, begins = self._pass(key)
        block = int(np.searchsorted(self._edges, sample, side="right")) - 1
        at = int(np.flatnonzero(order == block)[0])
        return int(begins[at]) + sample - int(self._edges[block])

    def within(self, samples: Ints, steps: Ints) -> Ints:
        """Return the samples some steps after others, going round in the block of each."""
        block = np.searchsorted(self._edges, samples, side="right") - 1
        begin, size = self._edges[block], self._edges[block + 1] - self._edges[block]
        return np.asarray(begin + (samples - begin + steps) % size)

    def _pass(self, key: int) -> tuple[Ints, Ints]:
        """Return the blocks in the order of a pass, and where each begins on its line."""
        found = self._passes.get(key)
        if found is None:
            sizes = np.diff(self._edges)
            count = np.array([len(sizes)])
            order = permute(np.arange(len(sizes)), count, np.array([key], np.uint64))
            begins = np.concatenate(([0], np.cumsum(sizes[order])[:-1]))
            found = self._passes[key] = order, begins
            if len(self._passes) > KEPT_PASSES:
                self._passes.popitem(last=False)
        return found


def block_sizes(edges: Ints) -> tuple[int, ...] | None:
    """Return the sizes of blocks with these edges, for a plan; None if there are too many.

    Example:
        >>> block_sizes(np.array([0, 5, 5, 8]))
        (5, 3)
    """
    sizes = np.diff(edges)
    sizes = sizes[sizes > 0]
    return tuple(sizes.tolist()) if 0 < len(sizes) <= MAX_BLOCKS else None


def even_sizes(num_samples: int, length: int) -> tuple[int, ...]:
    """Return sizes of blocks of one length, of which the last may be shorter.

    Example:
        >>> even_sizes(7, 3)
        (3, 3, 1)
    """
    full, rest = divmod(num_samples, length)
    return (length,) * full + (rest,) * (rest > 0)


def pieces_of(sizes: Ints, length: int) -> Ints:
    """Return the sizes of pieces of blocks, none of them longer than a length.

    Example:
        >>> pieces_of(np.array([7, 3, 4]), 3).tolist()
        [3, 2, 2, 3, 2, 2]
    """
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes, counts = np.repeat(sizes, counts), np.repeat(counts, counts)
    return np.asarray(sizes // counts + (number < sizes % counts))
