from __future__ import annotations

import logging
import random

import pytest

from energon.errors import ConfigError, DecodeError, FatalSampleError
from energon.stages.batch import BatchDataset
from energon.stages.hooks.failures import Tolerance, log_exception
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.stages.seed import SeedDataset
from energon.testing import check_resume
from tests.stages.hooks import drop_threes, fail_fives, repeat_by_rest
from tests.stages.numbers import numbers


def mapped(dataset, *functions, **settings):
    hooks = tuple(Hook(function.__name__, function, **settings) for function in functions)
    return MapDataset(dataset, (hooks,))


def double(sample):
    return {**sample, "n": sample["n"] * 2}


def tail(sample):
    yield sample
    yield {**sample, "tail": True}


def test_maps_every_sample_once():
    items = check_resume(mapped(numbers(40), double))
    assert [item["n"] for item in items] == list(range(0, 80, 4))


def test_skipped_samples_are_left_out_and_counted():
    lane = Lane(0, 1)
    dataset = mapped(numbers(30), drop_threes)
    assert [item["n"] for item in dataset.open(lane)] == [n for n in range(30) if n % 3]
    assert lane.counts["skipped"] == 10
    check_resume(dataset)


@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [
        (DecodeError("a.jpg: no whole image"), logging.WARNING, False),
        (DecodeError("a.jpg: no whole image"), logging.DEBUG, True),
        (ValueError("of the user"), logging.WARNING, True),
    ],
)
def test_damaged_data_are_logged_in_a_line_and_failing_hooks_with_traceback(
    caplog, error, level, traced
):
    with caplog.at_level(level, logger="energon"):
        try:
            raise error
        except Exception as raised:
            log_exception(raised, None)
    (record,) = caplog.records
    assert str(error) in record.message.splitlines()[0]
    assert ("\nTraceback (most recent call last):\n  File" in record.message) is traced


def test_exceptions_that_quote_whole_samples_are_logged_without_their_middle(caplog):
    text = "begin " + "x" * 10**6 + " end"
    try:
        raise ValueError(text)
    except ValueError as raised:
        log_exception(raised, None)
    (record,) = caplog.records
    assert len(record.getMessage()) < 10_000
    assert record.getMessage().count("ValueError: begin xxx") == 2
    assert record.getMessage().count("characters … xxx") == 2
    assert record.getMessage().endswith("xxx end")


def test_failed_samples_are_logged_with_the_cause_and_counted(caplog):
    lane = Lane(0, 1)
    items = list(mapped(numbers(10), fail_fives).open(lane))
    assert [item["n"] for item in items] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert lane.counts["failed"] == 2
    assert "no fives, got 5" in caplog.text


def test_a_bug_is_logged_with_one_traceback_and_then_a_line_for_each_sample(caplog):
    list(mapped(numbers(20), fail_fives).open(Lane(0, 1)))
    messages = [record.getMessage() for record in caplog.records]
    assert ["Traceback" in message for message in messages] == [True, False, False, False]
    assert ["got" in message for message in messages] == [True] * 4


def test_a_generator_gives_several_samples_and_resumes_between_them():
    items = check_resume(mapped(numbers(40), repeat_by_rest))
    assert [(item["n"], item["copy"]) for item in items] == [
        (n, copy) for n in range(0, 40, 2) for copy in range(n % 3)
    ]


def test_generators_may_follow_one_another():
    items = check_resume(mapped(numbers(20), repeat_by_rest, double, tail))
    assert [(item["n"] // 2, item["copy"], "tail" in item) for item in items] == [
        (n, copy, last) for n in range(0, 20, 2) for copy in range(n % 3) for last in (False, True)
    ]


def test_batches_are_made_of_consecutive_samples():
    dataset = BatchDataset(mapped(numbers(20), drop_threes), 3)
    assert [[item["n"] for item in batch] for batch in check_resume(dataset)] == [
        [2, 4, 8],
        [10, 14, 16],
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_is_smaller_or_dropped(drop_last):
    dataset = BatchDataset(numbers(11), 4, drop_last=drop_last)
    sizes = [len(batch) for batch in dataset.open(Lane(0, 1))]
    assert sizes == ([4, 4] if drop_last else [4, 4, 3])
    assert dataset.num_items(0, 1) == len(sizes)


def test_a_batch_hook_may_yield_several_batches():
    def halves(samples):
        yield samples[: len(samples) // 2]
        yield samples[len(samples) // 2 :]

    batches = check_resume(BatchDataset(numbers(16), 4, (Hook("batch", halves),)))
    assert [[item["n"] for item in batch] for batch in batches] == [
        [0, 2],
        [4, 6],
        [8, 10],
        [12, 14],
    ]


def test_too_many_failures_in_a_row_end_the_run_with_the_cause():
    def fail(sample):
        raise ValueError("broken for good")

    iterator = mapped(numbers(None), fail, tolerance=Tolerance(7)).open(Lane(0, 1))
    with pytest.raises(FatalSampleError, match=r"fail failed on .*broken for good.*7 failures"):
        next(iterator)


def test_a_success_forgives_the_failures_before():
    iterator = mapped(numbers(1000), fail_fives, tolerance=Tolerance(2)).open(Lane(0, 1))
    assert len(list(iterator)) == 800


def test_faults_of_the_program_end_the_run_at_once():
    def misspelled(sample):
        return smaple  # noqa: F821 - the point of the test

    with pytest.raises(FatalSampleError, match="smaple"):
        next(mapped(numbers(5), misspelled).open(Lane(0, 1)))


def test_rows_that_killed_workers_are_left_out():
    lane = Lane(0, 1, skip_rows=frozenset({3, 4}))
    assert [item["n"] for item in mapped(numbers(8), double).open(lane)] == [0, 2, 4, 10, 12, 14]
    assert lane.counts["skipped after killing workers"] == 2


def test_progress_is_told_with_the_row_of_every_sample():
    told = []
    lane = Lane(0, 2, progress=lambda row, several: told.append((row, several)))
    list(BatchDataset(mapped(numbers(6), double), 2).open(lane))
    assert told == [(0, False), (1, False), (0, True), (2, False), (2, True)]


def test_global_random_numbers_are_the_same_after_resuming_and_leave_no_trace():
    def draw(sample):
        return random.random()

    random.seed(5)
    before = random.getstate()
    dataset = SeedDataset(BatchDataset(mapped(numbers(40), draw), 4))
    check_resume(dataset)
    assert random.getstate() == before


def test_restored_seeds_depend_on_the_sample_alone():
    def draw(sample):
        return sample["n"], random.random()

    def drawn(lanes):
        dataset = mapped(numbers(24), draw, restore_seeds=True)
        return {pair for lane in range(lanes) for pair in dataset.open(Lane(lane, lanes))}

    assert drawn(2) == drawn(3)
    assert len({value for _, value in drawn(2)}) == 24


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        BatchDataset(numbers(5), 0)
