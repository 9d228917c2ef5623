from __future__ import annotations

import pytest

from energon import FatalSampleError, SkipSample, stateless
from energon.stages.lane import Lane
from megatron.energon import FilterDataset, IterMapDataset, MapDataset
from tests.compat.megatron.wrappers.streams import CONFIG, ids, items, numbers


def double(sample):
    return {**sample, "n": 2 * sample["n"]}


def twice(sample):
    if sample["n"] % 3 == 0:
        raise SkipSample
    yield sample
    yield sample


def test_a_function_is_applied_to_each_item():
    assert ids(items(MapDataset(numbers(5), double, worker_config=CONFIG))) == [0, 2, 4, 6, 8]


def test_a_function_may_yield_several_or_skip():
    assert ids(items(MapDataset(numbers(5), twice, worker_config=CONFIG))) == [1, 1, 2, 2, 4, 4]


def test_failures_are_tolerated_as_the_arguments_or_marks_say():
    def fail(sample):
        raise ValueError("broken")

    def stream(function, **settings):
        return MapDataset(numbers(50), function, worker_config=CONFIG, **settings)

    assert items(stream(fail, failure_tolerance=0)) == []
    with pytest.raises(FatalSampleError, match="7 failures in a row"):
        next(stream(fail, failure_tolerance=7).open(Lane(0, 1)))
    with pytest.raises(FatalSampleError, match="5 failures in a row"):
        next(stream(stateless(failure_tolerance=5)(fail)).open(Lane(0, 1)))


def test_a_filter_keeps_what_it_says():
    odd = FilterDataset(numbers(9), filter_fn=lambda s: s["n"] % 2, worker_config=CONFIG)
    assert ids(items(odd)) == [1, 3, 5, 7]


def test_a_filter_that_fails_leaves_the_item_out(caplog):
    lane = Lane(0, 1)
    broken = FilterDataset(numbers(9), filter_fn=lambda s: 1 // s["n"] >= 0, worker_config=CONFIG)
    assert ids(broken.open(lane)) == list(range(1, 9))
    assert lane.counts["failed"] == 1
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("stateless_iter_fn", [False, True])
def test_a_function_of_the_iterator(stateless_iter_fn):
    def pairs(samples):
        for sample in samples:
            yield sample
            yield double(sample)

    stream = IterMapDataset(
        numbers(4),
        pairs,
        len_map_fn=lambda n: 2 * n,
        stateless_iter_fn=stateless_iter_fn,
        worker_config=CONFIG,
    )
    assert ids(items(stream)) == [0, 0, 1, 2, 2, 4, 3, 6]
    assert len(stream) == 8


def test_what_a_function_depends_on_is_part_of_the_configuration():
    def config(given):
        stream = MapDataset(numbers(1), double, map_fn_config=given, worker_config=CONFIG)
        return stream.fingerprint(2)

    assert config({"scale": 2}) == config(lambda: {"scale": 2}) != config({"scale": 3})
