"""Deal samples to hands, such as the micro-batches of a step, so that all cost nearly the same."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import fsum

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct

Numbers = NDArray[np.float64] | Ints
Speeds = NDArray[np.float64]
"""Relative speeds, the largest of which is 1."""

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


def divide_by_speed(costs: Numbers, shares: Sequence[tuple[float, int]]) -> list[Ints]:
    """Return the samples of each speed, ascending, whose costs are in proportion to it.

    Of all ranks: the k-th largest samples of a speed of 0.5 cost half of those of the fastest, as
    far as there are such samples.

    Args:
        costs: The cost of each sample.
        shares: Speeds, of which the first is 1 and the others are less, and how many samples each
            is given.

    Example:
        >>> fast, slow = divide_by_speed(np.array([8, 3, 7, 4]), [(1, 2), (0.5, 2)])
        >>> fast.tolist(), slow.tolist()
        ([0, 2], [1, 3])
    """
    divided: list[list[int]] = [[] for _ in shares]
    costs_of_fastest: list[int] = []
    (_, most), *slower = shares
    values = costs.tolist()
    for sample in np.argsort(-costs, kind="stable").tolist():
        chosen, wanted = (0, values[sample]) if len(divided[0]) < most else (-1, 0)
        for number, (speed, count) in enumerate(slower, 1):
            rank = len(divided[number]) * most // count
            if len(divided[number]) < count and rank < len(costs_of_fastest):
                target = speed * costs_of_fastest[rank]
                if chosen < 0 or target >= wanted:
                    chosen, wanted = number, target
        divided[chosen].append(sample)
        if chosen == 0:
            costs_of_fastest.append(values[sample])
    return [np.sort(np.array(samples, np.int64)) for samples in divided]


def deal_to_lanes(
    costs: Ints,
    homes: Ints,
    lanes: int,
    hands: int,
    *,
    slack: int,
    speeds: Speeds | None = None,
) -> Ints:
    """Deal samples to the hands of lanes, and leave as many as possible in their own lanes.

    Args:
        costs: The cost of each sample; their number is a multiple of that of hands.
        homes: The lane of each sample without balancing, ascending.
        lanes: Number of lanes.
        hands: Number of hands, a multiple of that of lanes.
        slack: By how much the largest cost of a hand may exceed the least possible.
        speeds: The speed of each lane, by which the costs of its hands are divided; the largest is
            1. None if all are equal.

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
    groups = samples_by_speed(costs, lanes, speeds)
    dealt = _settled(costs, homes, groups, (lanes, turns * size))
    if turns > 1:
        dealt = np.concatenate([samples[deal(costs[samples], turns)] for samples in dealt])
    of_hands = None if speeds is None else np.repeat(speeds, turns)
    most = _least_time(costs, hands, of_hands) + slack
    if not _exchange(dealt, costs, most, of_hands):
        anew = np.empty_like(dealt)
        for own, samples in groups:
            of_lanes = (own[:, None] * turns + np.arange(turns)).ravel()
            anew[of_lanes] = samples[deal(costs[samples], len(own) * turns)]
        if of_hands is not None:  # each speed is dealt its samples apart
            _exchange(anew, costs, most, of_hands)
        dealt = min(dealt, anew, key=lambda each: _times(costs[each].sum(axis=1), of_hands).max())
    return np.sort(dealt, axis=1).reshape(lanes, turns, size)


def _least_time(costs: Ints, hands: int, speeds: Speeds | None) -> float:
    """Return a time that the slowest hand takes at least."""
    in_order, total = np.sort(costs), int(costs.sum())
    mean = -(-total // hands) if speeds is None else total / fsum(speeds.tolist())
    return max(mean, int(in_order[-1] + in_order[: len(costs) // hands - 1].sum()))


def samples_by_speed(costs: Numbers, lanes: int, speeds: Speeds | None) -> list[tuple[Ints, Ints]]:
    """Return the lanes of each speed, the fastest first, and which samples are for these."""
    if speeds is None:
        return [(np.arange(lanes), np.arange(len(costs)))]
    values = distinct(speeds)[::-1].tolist()
    groups = [np.flatnonzero(speeds == speed) for speed in values]
    shares = [len(costs) // lanes * len(own) for own in groups]
    divided = divide_by_speed(costs, list(zip(values, shares, strict=True)))
    return list(zip(groups, divided, strict=True))


def _times(loads: Ints, speeds: Speeds | None) -> Numbers:
    return loads if speeds is None else loads / speeds


def _settled(
    costs: Ints, homes: Ints, groups: Sequence[tuple[Ints, Ints]], shape: tuple[int, int]
) -> Ints:
    """Return the samples of each lane, as many as possible its own ones.

    Args:
        costs: The cost of each sample.
        homes: Their lanes.
        groups: Lanes, and the samples for these.
        shape: Lanes, and samples of a lane.
    """
    settled = np.empty(shape, np.int64)
    for lanes, samples in groups:
        lane_rank = np.full(shape[0], len(lanes))
        lane_rank[lanes] = np.arange(len(lanes))
        order = np.argsort(lane_rank[homes[samples]], kind="stable")
        samples = samples[order]
        settled[lanes] = samples[_settle(costs[samples], lane_rank[homes[samples]], len(lanes))]
    return settled


def _settle(costs: Ints, homes: Ints, lanes: int) -> Ints:
    """Give each lane as many samples, its own first; the largest others go to the least loaded.

    Those with a home beyond the lanes come from elsewhere.
    """
    room = len(costs) // lanes
    firsts = np.searchsorted(homes, np.arange(lanes + 1))
    rank = np.arange(len(costs)) - firsts[homes]
    settled = np.full((lanes, room), -1)
    kept = (rank < room) & (homes < lanes)
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


def _exchange(dealt: Ints, costs: Ints, most: float, speeds: Speeds | None = None) -> bool:
    """Exchange samples between heavy and light hands until no hand takes longer than `most`.

    Args:
        dealt: The samples of each hand; changed in place.
        costs: The cost of each sample, in whole numbers, so that sums are exact.
        most: The longest time that a hand may take: its cost over its speed.
        speeds: The speed of each hand; None if all are 1.

    Returns:
        Whether that was possible.
    """
    costs = costs[dealt]
    loads = costs.sum(axis=1)
    for _ in range(EXCHANGES):
        times = _times(loads, speeds)
        order = np.argsort(times, kind="stable")
        heavy = order[times[order] > most][::-1].tolist()
        light = order[: len(order) - len(heavy)]
        for turn, hand in enumerate(heavy if len(light) else ()):
            for others in (light[turn : turn + COMPARED_HANDS], light):
                less = costs[hand][:, None, None] - costs[others]
                ours, theirs = loads[hand] - less, loads[others][:, None] + less
                if speeds is not None:
                    ours, theirs = ours / speeds[hand], theirs / speeds[others][:, None]
                time = np.maximum(ours, theirs)
                best = int(time.argmin()) if time.size else 0
                if time.size and time.flat[best] < times[hand]:
                    given, number, taken = map(int, np.unravel_index(best, time.shape))
                    other = int(others[number])
                    for array in (dealt, costs):
                        pair = array[hand, given], array[other, taken]
                        array[other, taken], array[hand, given] = pair
                    loads[hand] -= less[given, number, taken]
                    loads[other] += less[given, number, taken]
                    times = _times(loads, speeds)
                    break
        if times.max() <= most:
            return True
    return False
