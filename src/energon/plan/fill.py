"""Fill packs with samples, as many as a budget admits.

The larger samples come first, each into the pack that it leaves the least room in. Those of about
the same size come in an order that is permuted by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.plan.deal import Speeds
from energon.plan.randomness import permute

PACK_ROWS = 1 << 16
"""Rows of a pack, which is the largest number of its samples."""
TRIED_PACKS = 32
"""Packs that are tried for a sample of several dimensions before it gets a new one."""

SIZE_LEVELS, MIN_SIZE = 2, 1 / 8
"""Samples are mixed whose sizes are the same in this many steps for each factor of 2, and smaller
ones: packs are as full as without, and samples of all sizes meet."""
PackNumbers = Ints
"""The number of the pack of each sample; below 0 for none."""


@dataclass(frozen=True)
class Budget:
    """What a pack may contain.

    Args:
        room: Largest sum of the lengths of its samples, in each dimension.
        padded: Whether samples count as much as the longest of their pack. For one dimension.
        by_speed: Whether packs of slower lanes have less room, in proportion to their speed.

    Example:
        >>> lengths = np.array([[6], [5], [4], [3]])
        >>> Budget((10,)).fill(lengths)
        (array([0, 1, 1, 0]), 2)
        >>> Budget((10,), padded=True).fill(lengths)
        (array([0, 1, 1, 2]), 3)
    """

    room: tuple[int, ...]
    padded: bool = False
    by_speed: bool = False

    def shares(self, lengths: Ints, speeds: Speeds) -> list[_Share]:
        """Return which lanes share which samples.

        Args:
            lengths: Shape (samples, dimensions).
            speeds: The speed of each lane.
        """
        if not self.by_speed:
            return [_Share(np.arange(len(speeds)), np.arange(len(lengths)), self)]
        values = distinct(speeds)[::-1].tolist()
        lanes = [np.flatnonzero(speeds == speed) for speed in values]
        budgets = [Budget(tuple(int(r * s) for r in self.room), self.padded) for s in values]
        limits = [
            (budget.room[0], speed * len(own))
            for budget, speed, own in zip(budgets, values, lanes, strict=True)
        ]
        samples = _divide(lengths[:, 0], limits, padded=self.padded)
        return list(map(_Share, lanes, samples, budgets))

    def fill(self, lengths: Ints, key: int = 0) -> tuple[PackNumbers, int]:
        """Return the pack of each sample, and how many packs there are.

        A sample beyond the room is in no pack.

        Args:
            lengths: Shape (samples, dimensions).
            key: Permutes samples of about the same size.
        """
        if not len(lengths):
            return np.empty(0, np.int64), 0
        order = self._larger_first(lengths, key)
        if self.padded:
            return _cut(lengths[:, 0], order, self.room[0])
        return _fill(lengths, order, self.room)

    def _larger_first(self, lengths: Ints, key: int) -> Ints:
        """Return the numbers of the samples within the room, the larger ones first."""
        size = (lengths / np.array(self.room)).max(axis=1)
        count = np.array([len(size)])
        mixed = permute(np.arange(len(size)), count, np.array([key], np.uint64))
        mixed = mixed[size[mixed] <= 1]
        level = size[mixed]
        if not self.padded:
            level = np.round(SIZE_LEVELS * np.log2(np.maximum(level, MIN_SIZE)))
        return np.asarray(mixed[np.argsort(-level, kind="stable")])

    def has_room(self, lengths: Ints, bins: PackNumbers, count: int) -> bool:
        """Return whether no pack exceeds the room."""
        chosen = bins >= 0
        if self.padded:
            longest = np.zeros(count, np.int64)
            np.maximum.at(longest, bins[chosen], lengths[chosen, 0])
            sizes = longest * np.bincount(bins[chosen], minlength=count)
            return bool(sizes.max(initial=0) <= self.room[0])
        return all(
            np.bincount(bins[chosen], lengths[chosen, number], minlength=count).max(initial=0)
            <= each
            for number, each in enumerate(self.room)
        )


class _Share(NamedTuple):
    """Lanes of a pool whose packs have the same room, and the samples for them."""

    lanes: Ints
    samples: Ints
    budget: Budget


def _divide(
    sizes: Ints, shares: Sequence[tuple[int, float]], *, padded: bool = False
) -> list[Ints]:
    """Return the samples of each share, ascending, whose sizes are in proportion to its weight.

    As far as they fit: none is larger than the room of its share.

    Args:
        sizes: The size of each sample.
        shares: For each its room and weight; that of the first is large enough for all samples.
        padded: Whether each share is given as many similar samples at a time as have room, if all
            are as large as the first of them.

    Example:
        >>> large, small = _divide(np.array([9, 2, 4, 3, 3]), [(10, 2), (5, 1)])
        >>> large.tolist(), small.tolist()
        ([0, 1, 3], [2, 4])
    """
    divided: list[list[int]] = [[] for _ in shares]
    filled = [0.0] * len(shares)
    order = np.argsort(-sizes, kind="stable")
    values = np.maximum(sizes[order], 1).tolist()
    start = 0
    while start < len(values):
        size = values[start]
        after = [
            (each + (room if padded else size) / weight, number)
            for number, (each, (room, weight)) in enumerate(zip(filled, shares, strict=True))
            if size <= room
        ]
        least, chosen = min(after, default=(filled[0], 0))
        stop = start + (max(1, shares[chosen][0] // size) if padded else 1)
        divided[chosen] += order[start:stop].tolist()
        filled[chosen] = least
        start = stop
    return [np.sort(np.array(samples, np.int64)) for samples in divided]


def _cut(lengths: Ints, order: Ints, room: int) -> tuple[PackNumbers, int]:
    """Divide samples, sorted by length, into packs in which each counts as much as the longest."""
    values = lengths[order]
    bins = np.full(len(lengths), -1, np.int64)
    start = count = 0
    while start < len(order):
        stop = start + min(PACK_ROWS, room // max(1, int(values[start])))
        bins[order[start:stop]] = count
        start, count = stop, count + 1
    return bins, count


def _fill(lengths: Ints, order: Ints, room: Sequence[int]) -> tuple[PackNumbers, int]:
    """Put each sample in turn into the pack in which it leaves the least room."""
    # Packs are looked up by the room that is left in the dimension that fills them.
    main = int((lengths / np.array(room)).sum(axis=0).argmax())
    keys = lengths[:, main].tolist()
    rest = np.delete(lengths, main, axis=1).tolist() if len(room) > 1 else None
    left_of_rest: list[list[int]] = []
    others = [each for number, each in enumerate(room) if number != main]
    bins = np.full(len(lengths), -1, np.int64)
    packs: dict[int, list[int]] = {}  # by the room left
    rooms = 0  # bit r is set if some pack has room for r more
    counts: list[int] = []
    for item in order.tolist():
        key, pack, left, tried = keys[item], -1, 0, 0
        above = rooms >> key
        while above and pack < 0:
            left = key + (above & -above).bit_length() - 1
            same = packs[left]
            for number in range(len(same) - 1, -1, -1):
                if rest is None or _fits(rest[item], left_of_rest[same[number]]):
                    pack = same.pop(number)
                    break
                tried += 1
            if tried > TRIED_PACKS:
                break
            above = (above >> (left - key + 1)) << (left - key + 1)
        if pack < 0:
            pack, left = len(counts), room[main]
            counts.append(0)
            left_of_rest.append(list(others))
        elif not packs[left]:
            rooms ^= 1 << left
        bins[item] = pack
        counts[pack] += 1
        if rest is not None:
            left_of_rest[pack] = [
                a - b for a, b in zip(left_of_rest[pack], rest[item], strict=True)
            ]
        if counts[pack] < PACK_ROWS:
            packs.setdefault(left - key, []).append(pack)
            rooms |= 1 << (left - key)
    return bins, len(counts)


def _fits(lengths: list[int], left: list[int]) -> bool:
    return all(length <= room for length, room in zip(lengths, left, strict=True))


def add_packs(
    bins: PackNumbers,
    count: int,
    total: int,
    *,
    group: int,
    lengths: Ints,
    costs: NDArray[np.float64],
    budget: Budget,
) -> PackNumbers:
    """Return packs of the same samples, of which there are more, so that none is empty.

    Args:
        bins: The pack of each sample.
        count: How many packs there are.
        total: How many there should be, a multiple of `group`.
        group: Packs of a step, of which the last ones have what is left.
        lengths: The lengths of each sample.
        costs: The cost of each sample.
        budget: What a pack may contain.
    """
    new = total - count
    if not new:
        return bins
    samples = np.flatnonzero(bins >= 0)
    loads = np.bincount(bins[samples], costs[samples], minlength=count)
    opened = np.argsort(loads, kind="stable")[: -new % group or min(group, count)]
    names = np.concatenate((opened, np.arange(count, total)))
    of_opened = samples[np.isin(bins[samples], opened)]
    if len(of_opened) >= len(names):
        own = np.empty(len(of_opened), np.int64)
        heap = [(0.0, number) for number in range(len(names))]
        heapify(heap)
        values = costs[of_opened].tolist()
        for item in np.argsort(-costs[of_opened], kind="stable").tolist():
            load, number = heap[0]
            own[item] = number
            heapreplace(heap, (load + values[item], number))
        filled = bins.copy()
        filled[of_opened] = names[own]
        if budget.has_room(lengths, filled, total) and len(distinct(own)) == len(names):
            return filled
    return _halved(bins, count, total)


def _halved(bins: PackNumbers, count: int, total: int) -> PackNumbers:
    """Return packs of which the one with the most samples is halved until there are enough."""
    halved = bins.copy()
    members = [np.flatnonzero(bins == number) for number in range(count)]
    heap = [(-len(items), number) for number, items in enumerate(members)]
    heapify(heap)
    for number in range(count, total):
        size, largest = heappop(heap) if heap else (0, 0)
        if size > -2:
            break
        items = members[largest]
        members[largest] = items[::2]
        members.append(items[1::2])
        halved[items[1::2]] = number
        for each in (largest, number):
            heappush(heap, (-len(members[each]), each))
    return halved
