from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError, FatalSampleError, SkipSample
from energon.stages.batch import GroupDataset
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.testing import check_resume
from tests.stages.counts import check_counts
from tests.stages.hooks import ids, repeat_by_rest
from tests.stages.numbers import numbers


def by_rest(sample):
    return sample["n"] % 3, None


def sized(sample):
    rest = sample["n"] % 4
    return ("rest", rest), np.int64(rest + 1)


def skipping(sample):
    if sample["n"] % 5 == 0:
        raise SkipSample
    return by_rest(sample)


def single_or_skipping(sample):
    """Skip samples that are drawn behind one that is a batch of its own."""
    return ("single", 1) if sample["n"] % 5 == 4 else skipping(sample)


def grouped(dataset, criterion=by_rest, batch_size=4, *functions, **options):
    hooks = tuple(Hook(function.__name__, function, restore_seeds=True) for function in functions)
    return GroupDataset(dataset, Hook(criterion.__name__, criterion), batch_size, hooks, **options)


def halves(samples):
    yield ids(samples)[: len(samples) // 2]
    yield ids(samples)[len(samples) // 2 :]


@settings(deadline=None, max_examples=25)
@given(
    total=st.integers(0, 60),
    criterion=st.sampled_from([by_rest, sized, skipping, single_or_skipping]),
    batch=st.sampled_from([ids, halves]),
    drop_last=st.booleans(),
    several=st.booleans(),
)
def test_grouping_resumes_at_every_batch(total, criterion, batch, drop_last, several):
    dataset = numbers(total)
    if several:
        hooks = (Hook("repeat", repeat_by_rest),)
        dataset = MapDataset(dataset, (hooks,))
    check_resume(grouped(dataset, criterion, 4, batch, drop_last=drop_last))


@settings(deadline=None, max_examples=25)
@given(total=st.integers(0, 100))
def test_every_sample_is_in_one_batch_of_its_group(total):
    batches = list(grouped(numbers(total), sized, None, ids).open(Lane(0, 1)))
    assert sorted(n for batch in batches for n in batch) == list(range(total))
    for batch in batches:
        (rest,) = {n % 4 for n in batch}
        assert len(batch) <= rest + 1


def test_batches_come_as_soon_as_they_are_full():
    batches = grouped(numbers(20), by_rest, 3, ids).open(Lane(0, 1))
    assert list(batches) == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
        [9, 12, 15],
        [10, 13, 16],
        [11, 14, 17],
        [18],
        [19],
    ]


def test_batches_come_as_if_samples_were_drawn_one_by_one():
    expected, waiting = [], {}
    for number in range(200):
        group, size = number * number % 7, number * number % 7 % 3 + 1
        waiting.setdefault(group, []).append(number)
        if len(waiting[group]) == size:
            expected.append(waiting.pop(group))

    def criterion(sample):
        group = sample["n"] ** 2 % 7
        return group, group % 3 + 1

    batches = list(grouped(numbers(200), criterion, 3, ids, drop_last=True).open(Lane(0, 1)))
    assert batches == expected


def test_what_is_left_at_the_end_can_be_dropped():
    batches = list(grouped(numbers(20), by_rest, 3, ids, drop_last=True).open(Lane(0, 1)))
    assert {len(batch) for batch in batches} == {3}


def test_a_sample_without_a_group_is_left_out():
    lane = Lane(0, 1)
    batches = list(grouped(numbers(30), skipping, 3, ids).open(lane))
    assert sorted(n for batch in batches for n in batch) == [n for n in range(30) if n % 5]
    assert lane.counts == Counter({"samples": 24, "skipped": 6})


@pytest.mark.parametrize("criterion", [skipping, single_or_skipping])
def test_counts_are_the_same_with_and_without_a_restore(criterion):
    check_counts(grouped(numbers(60), criterion, 4, ids))


def test_the_state_has_only_the_places_of_what_waits():
    iterator = grouped(numbers(None), lambda sample: (sample["n"] % 500, None), 4).open(Lane(0, 1))
    next(iterator)
    assert len(json.dumps(iterator.state_dict())) < 16_384


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3, "returned 3; expected a group and a batch size or None"),
        (([], None), r"the group \[\], which is not hashable"),
        (("a", 0), "batch size 0 for group 'a'"),
        (("a", None), "batch size None for group 'a'; give a whole number from 1 here"),
        (("a", "2"), "batch size '2' for group 'a'; give a whole number"),
    ],
)
def test_a_criterion_that_makes_no_sense_ends_the_run(found, message):
    with pytest.raises(FatalSampleError, match=message):
        next(grouped(numbers(5), lambda _: found, None).open(Lane(0, 1)))


def test_a_tensor_as_the_group_ends_the_run():
    torch = pytest.importorskip("torch")
    with pytest.raises(FatalSampleError, match="a tensor as the group; use 2, its value"):
        next(grouped(numbers(5), lambda _: (torch.tensor(2), None), 2).open(Lane(0, 1)))


def test_two_batch_sizes_for_one_group_end_the_run():
    with pytest.raises(
        FatalSampleError,
        match="batch size 6 for group 'a', and 5 for .*; all samples of a group need the same",
    ):
        next(grouped(numbers(5), lambda sample: ("a", 5 + sample["n"])).open(Lane(0, 1)))


def test_batches_of_nothing_are_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        grouped(numbers(5), by_rest, 0)


def test_a_batch_is_restored_by_the_keys_of_its_samples():
    def batch(samples):
        for part in (samples[::2], samples[1::2]):
            yield {"ids": ids(part), "draw": random.random(), "__restore_key__": ()}

    dataset = grouped(numbers(40), by_rest, 4, batch)
    lane = Lane(0, 1)
    for made in dataset.open(lane):
        assert dataset.restore(lane, made["__restore_key__"]) == (made, ())
