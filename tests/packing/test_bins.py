from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, SampleError
from energon.packing.packer import fill_exactly, first_fit_decreasing, greedy_knapsack

METHODS = [
    first_fit_decreasing,
    fill_exactly,
    partial(fill_exactly, balance=True),
    partial(fill_exactly, oldest_first=True),
]


def sizes(*dimensions):
    item = st.tuples(*(st.integers(0, room) for room in dimensions))
    items = st.lists(item, max_size=60)
    return items.map(lambda found: np.array(found, np.int64).reshape(-1, len(dimensions)))


def token_counts(count, *, seed):
    """Lengths as those of text samples: log-normal, most of them short, cut at the context."""
    drawn = np.random.default_rng(seed).lognormal(np.log(700), 0.9, count)
    return np.clip(drawn, 1, 8192).astype(np.int64)[:, None]


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_every_item_is_in_one_bin_and_no_bin_overflows(method, data):
    room = data.draw(st.sampled_from([(20,), (20, 7), (9, 30, 4)]))
    lengths = data.draw(sizes(*room))
    bins = method(lengths, room)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all((lengths[items].sum(axis=0) <= room).all() and items for items in bins)


@given(lengths=sizes(20), room=st.just((20,)))
@settings(deadline=None, max_examples=50)
def test_first_fit_decreasing_keeps_its_guarantee(lengths, room):
    least = -(-int(lengths.sum()) // room[0])
    assert len(first_fit_decreasing(lengths, room)) <= 11 / 9 * max(least, 1) + 2


@given(lengths=sizes(20))
@settings(deadline=None, max_examples=50)
def test_the_first_bin_is_as_full_as_one_with_its_largest_item_can_be(lengths):
    if not len(lengths):
        return
    first = fill_exactly(lengths, (20,))[0]
    seed = int(np.argmax(lengths[:, 0]))
    rest = np.delete(lengths[:, 0], seed)
    sums = {0}
    for length in rest.tolist():
        sums |= {total + length for total in sums}
    best = max(total for total in sums if total + lengths[seed, 0] <= 20)
    assert lengths[first, 0].sum() == lengths[seed, 0] + best


def test_padding_is_that_of_the_best_possible_division_for_lengths_of_texts():
    bins = tokens = least = 0
    for seed in range(10):
        lengths = token_counts(512, seed=seed)
        bins += len(fill_exactly(lengths, (8192,)))
        least += -(-int(lengths.sum()) // 8192)
        tokens += int(lengths.sum())
    assert bins <= least + 1
    assert 1 - tokens / (bins * 8192) <= 0.01


def test_two_dimensions_are_packed_closer_than_by_first_fit():
    drawn = np.random.default_rng(3)
    filled = first = 0
    for seed in range(3):
        tiles = drawn.integers(0, 13, (512, 1))
        lengths = np.concatenate([token_counts(512, seed=seed), tiles], axis=1)
        filled += len(fill_exactly(lengths, (8192, 48)))
        first += len(first_fit_decreasing(lengths, (8192, 48)))
    assert filled < 0.95 * first


def test_balanced_bins_cost_attention_nearly_alike():
    def spread(bins, lengths):
        squares = [float((lengths[items].astype(float) ** 2).sum()) for items in bins]
        return np.std(squares) / np.mean(squares)

    plain = balanced = 0.0
    for seed in range(10):
        lengths = np.minimum(token_counts(512, seed=seed), 3000)
        plain += spread(fill_exactly(lengths, (8192,)), lengths)
        balanced += spread(fill_exactly(lengths, (8192,), balance=True), lengths)
    assert balanced < plain / 2


def test_the_first_bin_takes_the_items_that_come_first_if_asked_to():
    lengths = np.array([[3], [1], [2], [9], [8], [4]])
    assert fill_exactly(lengths, (10,), oldest_first=True)[0] == [0, 1, 2, 5]


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(20, 40))
@settings(deadline=None, max_examples=100)
def test_each_knapsack_takes_the_largest_sample_that_still_fits(sizes, capacity):
    samples = [(size, number) for number, size in enumerate(sizes)]
    left, expected = sorted(samples), []
    while left:
        expected.append([])
        room = capacity
        while fitting := [sample for sample in left if sample[0] <= room]:
            expected[-1].append(fitting[-1])
            left.remove(fitting[-1])
            room -= fitting[-1][0]
    assert greedy_knapsack(sizes, samples, capacity) == expected


def test_samples_that_fit_no_knapsack_are_refused():
    with pytest.raises(SampleError, match="sample 'b' has the length 9, the room of a pack is 8"):
        greedy_knapsack([1, 9], [{"__key__": "a"}, {"__key__": "b"}], 8)
    with pytest.raises(ConfigError, match="3 samples have 2 lengths"):
        greedy_knapsack([1, 9], ["a", "b", "c"], 8)
