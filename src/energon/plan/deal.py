"""Deal samples to hands, such as the micro-batches of a step, so that all cost nearly the same."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints

Numbers = NDArray[np.float64] | Ints

COMPARED_HANDS = 16
"""Hands among which a heavy one looks for a sample to exchange before it tries all."""
EXCHANGES = 16
"""How often each heavy hand exchanges a sample at most."""


def deal(costs: Numbers, hands: int) -> Ints:
    """Return the samples of each hand, shape (hands, samples of a hand), with costs nearly equal.

    Args:
        costs: The cost of each sample; their number is a multiple of that of hands.
        hands: Number of hands.

    Example:
        >>> deal(np.array([9, 1, 2, 8]), 2).tolist()
        [[0, 1], [2, 3]]
    """
    size = len(costs) // hands
    if hands == 1:
        return np.arange(size)[None]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    loads = [(0.0, hand) for hand in range(hands)]
    heapify(loads)
    values = costs.tolist()
    for sample in np.argsort(-costs, kind="stable").tolist():
        load, hand = heappop(loads)
        dealt[hand].append(sample)
        if len(dealt[hand]) < size:
            heappush(loads, (load + values[sample], hand))
    return np.sort(np.array(dealt), axis=1)


def deal_to_lanes(costs: Ints, homes: Ints, lanes: int, hands: int, *, slack: int) -> Ints:
    """Deal samples to the hands of lanes, and leave as many as possible in their own lanes.

    Args:
        costs: The cost of each sample; their number is a multiple of that of hands.
        homes: The lane of each sample without balancing, ascending.
        lanes: Number of lanes.
        hands: Number of hands, a multiple of that of lanes.
        slack: By how much the largest cost of a hand may exceed the least possible.

    Returns:
        The samples of each hand, shape (lanes, hands of a lane, samples of a hand).

    Example:
        >>> costs, homes = np.array([9, 8, 2, 1, 2, 1]), np.array([0, 0, 1, 1, 2, 2])
        >>> deal_to_lanes(costs, homes, 3, 3, slack=1)[:, 0].tolist()
        [[1, 2], [0, 3], [4, 5]]
    """
    turns, size = hands // lanes, len(costs) // hands
    if lanes == 1:
        return deal(costs, hands)[None]
    dealt = _settle(costs, homes, lanes)
    if turns > 1:
        dealt = np.concatenate([samples[deal(costs[samples], turns)] for samples in dealt])
    in_order = np.sort(costs)
    least = max(-(-int(costs.sum()) // hands), int(in_order[-1] + in_order[: size - 1].sum()))
    if not _exchange(dealt, costs, least + slack):
        dealt = min(dealt, deal(costs, hands), key=lambda each: int(costs[each].sum(axis=1).max()))
    return np.sort(dealt, axis=1).reshape(lanes, turns, size)


def _settle(costs: Ints, homes: Ints, lanes: int) -> Ints:
    """Give each lane as many samples, its own first; the largest others go to the least loaded."""
    room = len(costs) // lanes
    firsts = np.searchsorted(homes, np.arange(lanes))
    rank = np.arange(len(costs)) - firsts[homes]
    settled = np.full((lanes, room), -1)
    kept = rank < room
    settled[homes[kept], rank[kept]] = np.flatnonzero(kept)
    others = np.flatnonzero(~kept)
    missing = (settled < 0).sum(axis=1)
    loads = np.where(settled < 0, 0, costs[settled]).sum(axis=1)
    open_lanes = [(int(loads[lane]), lane) for lane in np.flatnonzero(missing).tolist()]
    heapify(open_lanes)
    for sample in others[np.argsort(-costs[others], kind="stable")].tolist():
        load, lane = heappop(open_lanes)
        settled[lane, room - missing[lane]] = sample
        missing[lane] -= 1
        if missing[lane]:
            heappush(open_lanes, (load + int(costs[sample]), lane))
    return settled


def _exchange(dealt: Ints, costs: Ints, most: int) -> bool:
    """Exchange samples between heavy and light hands until no hand has a higher cost than `most`.

    Args:
        dealt: The samples of each hand; changed in place.
        costs: The cost of each sample, in whole numbers, so that sums are exact.
        most: The highest cost that a hand may have.

    Returns:
        Whether that was possible.
    """
    costs = costs[dealt]
    loads = costs.sum(axis=1)
    for _ in range(EXCHANGES):
        order = np.argsort(loads, kind="stable")
        heavy = order[loads[order] > most][::-1].tolist()
        light = order[: len(order) - len(heavy)]
        for turn, hand in enumerate(heavy if len(light) else ()):
            for others in (light[turn : turn + COMPARED_HANDS], light):
                less = costs[hand][:, None, None] - costs[others]
                load = np.maximum(loads[hand] - less, loads[others][:, None] + less)
                best = int(load.argmin()) if load.size else 0
                if load.size and load.flat[best] < loads[hand]:
                    given, number, taken = map(int, np.unravel_index(best, load.shape))
                    other = int(others[number])
                    for array in (dealt, costs):
                        ours, theirs = array[hand, given], array[other, taken]
                        array[hand, given], array[other, taken] = theirs, ours
                    loads[hand] -= less[given, number, taken]
                    loads[other] += less[given, number, taken]
                    break
        if int(loads.max()) <= most:
            return True
    return False
