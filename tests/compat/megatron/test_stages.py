"""Stages over whole streams: concatenate, blend, repeat, limit, shuffle, map."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.compat.megatron.datasets.leaf import ReadPass
from energon.errors import ConfigError, StateError
from energon.stages.batch import BatchDataset
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.testing import check_resume
from megatron.energon import (
    BlendDataset,
    ConcatDataset,
    IterMapDataset,
    LimitDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from tests.compat.megatron.wrappers.streams import CONFIG
from tests.stages.numbers import numbers
from tests.stages.test_read import DamagedReader


def concat(*datasets):
    return ConcatDataset(*datasets, worker_config=CONFIG)


def blend(*datasets):
    return BlendDataset(*datasets, worker_config=CONFIG)


def repeat(dataset, repeats=None):
    return RepeatDataset(dataset, repeats=repeats, worker_config=CONFIG)


def limit(dataset, length):
    return LimitDataset(dataset, length, worker_config=CONFIG)


def shuffle(dataset, size):
    return ShuffleBufferDataset(dataset, size, worker_config=CONFIG)


def iter_map(dataset, function, length, *, remembers=True):
    return IterMapDataset(
        dataset, function, len_map_fn=length, stateless_iter_fn=not remembers, worker_config=CONFIG
    )


def named(dataset, name):
    hooks = (Hook("name", lambda sample: {**sample, "from": name}),)
    return MapDataset(dataset, (hooks,))


def passes(num_samples):
    """Samples 0 to `num_samples` in each pass; what is read is the number of the draw."""
    return ReadPass(numbers(None), num_samples)


def test_a_pass_whose_last_samples_cannot_be_read_does_not_go_on_in_the_next():
    stage = ReadPass(replace(numbers(None), reader=DamagedReader()), 7)
    assert ids(stage.open(Lane(0, 1))) == [1, 2, 3, 4]
    assert [ids(stage.open(Lane(0, 1)).take(count)[0]) for count in (3, 9)] == [
        [1, 2],
        [1, 2, 3, 4],
    ]


def ids(items):
    return [item["n"] for item in items]


def pairs(items):
    """Yield each item twice; nothing is remembered."""
    for item in items:
        yield item
        yield {**item, "again": True}


def sums(items):
    """Yield the sum of all items so far: everything is remembered."""
    total = 0
    for item in items:
        total += item["n"]
        if total % 2:
            yield {"n": total}


STREAMS = {
    "concat": lambda: concat(named(numbers(11), "a"), numbers(0), named(numbers(7), "b")),
    "blend": lambda: blend((named(numbers(20), "a"), 2), (named(numbers(9), "b"), 1)),
    "endless blend": lambda: blend((numbers(5), 1), (numbers(None), 1), (numbers(7), 0)),
    "repeat": lambda: repeat(passes(7)),
    "repeat a few times": lambda: repeat(passes(7), 2.5),
    "repeat a repetition": lambda: repeat(repeat(passes(5), 2), 2),
    "limit": lambda: limit(numbers(None), 15),
    "shuffle": lambda: shuffle(numbers(30), 8),
    "shuffle repetitions": lambda: repeat(shuffle(passes(9), 4), 3),
    "pairs": lambda: iter_map(numbers(12), pairs, lambda n: 2 * n, remembers=False),
    "sums": lambda: iter_map(numbers(12), sums, lambda n: n),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_streams_resume_at_every_item(name):
    check_resume(STREAMS[name](), lanes=3)


@pytest.mark.parametrize("name", STREAMS)
def test_no_stream_promises_fewer_items_than_it_yields(name):
    stream = STREAMS[name]()
    for lane in range(3):
        promised = stream.num_items(lane, 3)
        found = len(list(islice(stream.open(Lane(lane, 3)), 60)))
        assert promised is None or found <= promised


def test_concatenated_streams_come_one_after_the_other():
    items = list(STREAMS["concat"]().open(Lane(0, 1)))
    assert ids(items) == [*range(11), *range(7)]


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    count=st.integers(1, 300),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_shares_of_a_blend_are_exact_but_for_a_few_items(weights, count, seed):
    stream = blend(*((named(numbers(None), name), each) for name, each in enumerate(weights)))
    drawn = Counter(item["from"] for item in islice(stream.open(Lane(0, 1, seed=seed)), count))
    for name, weight in enumerate(weights):
        assert abs(drawn[name] - count * weight / sum(weights)) <= 2


def test_a_blend_ends_when_everything_was_drawn():
    items = list(STREAMS["blend"]().open(Lane(0, 1)))
    assert Counter(item["from"] for item in items) == {"a": 20, "b": 9}


def test_lanes_of_a_blend_do_not_all_begin_with_the_same_dataset():
    stream = blend(*((named(numbers(None), name), 1) for name in "ab"))
    firsts = {next(stream.open(Lane(lane, 16, seed=5)))["from"] for lane in range(16)}
    assert firsts == {"a", "b"}


@pytest.mark.parametrize("lanes", [1, 2, 5, 11])
def test_every_pass_has_every_sample_once(lanes):
    drawn = []
    for lane in range(lanes):
        iterator = repeat(passes(7), 3).open(Lane(lane, lanes))
        drawn += [item["n"] for item in iterator]
    assert sorted(drawn) == list(range(21))


def test_small_data_are_repeated_without_end_for_every_lane():
    for lane in range(5):
        assert len(list(islice(repeat(passes(2)).open(Lane(lane, 5)), 10))) == 10


def test_repeating_nothing_ends():
    assert list(repeat(numbers(0)).open(Lane(0, 2))) == []


@given(length=st.integers(0, 40), lanes=st.integers(1, 7))
@settings(deadline=None, max_examples=40)
def test_a_limit_holds_over_all_lanes(length, lanes):
    stream = limit(numbers(None), length)
    assert sum(len(list(stream.open(Lane(lane, lanes)))) for lane in range(lanes)) == length


def test_a_shuffle_buffer_yields_everything_once_in_another_order():
    items = ids(shuffle(numbers(200), 50).open(Lane(0, 1)))
    assert sorted(items) == list(range(200))
    assert items != sorted(items)
    assert all(n < place + 50 for place, n in enumerate(items))


def test_a_function_of_streams_gets_all_items():
    assert ids(STREAMS["pairs"]().open(Lane(0, 1))) == sorted([*range(12)] * 2)


def test_a_function_that_remembers_nothing_is_resumed_at_its_last_input():
    stream = iter_map(numbers(None), pairs, lambda n: 2 * n, remembers=False)
    iterator = stream.open(Lane(0, 1))
    for _ in range(1001):
        next(iterator)
    assert iterator.state_dict() == {"start": {"row": 500}, "given": 1}


def test_rows_of_merged_streams_are_told_apart():
    rows = []
    stream = blend((named(numbers(6), "a"), 1), (concat(named(numbers(4), "b")), 1))
    lane = Lane(0, 1, progress=lambda row, several: rows.append(row))
    assert len(list(stream.open(lane))) == 10
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]

    skipping = Lane(0, 1, skip_rows=frozenset({2, 5}))
    left = [(item["from"], item["n"]) for item in stream.open(skipping)]
    assert ("a", 1) not in left
    assert ("b", 2) not in left
    assert len(left) == 8


def test_a_sample_of_merged_streams_is_restored_by_its_key():
    stream = concat(numbers(6), BatchDataset(numbers(4), 2))
    assert stream.restore(Lane(0, 1), (0, 0, 3))[0]["n"] == 3
    with pytest.raises(StateError, match="no dataset has"):
        stream.restore(Lane(0, 1), (0, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: concat(), "at least one dataset"),
        (lambda: blend((numbers(1), 0)), "not all 0"),
        (lambda: blend((numbers(1), -1)), "at least 0"),
        (lambda: repeat(numbers(1), 0), "above 0"),
        (lambda: limit(numbers(1), -1), "got -1"),
        (lambda: shuffle(numbers(1), 0), "at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_states_are_json():
    for name, make in STREAMS.items():
        iterator = make().open(Lane(1, 2))
        next(iterator)
        state = iterator.state_dict()
        assert json.loads(json.dumps(state)) == state, name


def test_streams_of_functions_that_remember_nothing_restore_samples():
    def squares(items):
        for item in items:
            yield {**item, "square": item["n"] ** 2}

    stream = iter_map(numbers(12), squares, int, remembers=False)
    for item in stream.open(Lane(0, 1)):
        assert stream.restore(Lane(0, 1), item["__restore_key__"]) == (item, ())


def test_streams_that_cannot_restore_samples_say_why():
    key = next(numbers(1).open(Lane(0, 1)))["__restore_key__"]
    with pytest.raises(ConfigError, match="stateless_iter_fn=True"):
        iter_map(numbers(12), sums, int).restore(Lane(0, 1), key)
    with pytest.raises(StateError, match="yields 2 outputs"):
        iter_map(numbers(12), pairs, int, remembers=False).restore(Lane(0, 1), key)
