from __future__ import annotations

import logging

import pytest

from energon.errors import ConfigError, DecodeError
from energon.stages.batch import BatchDataset
from energon.stages.hooks.failures import Tolerance, log_exception
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.map import MapDataset
from energon.testing import check_resume
from tests.stages.hooks import fail_fives, repeat_by_rest
from tests.stages.numbers import numbers


def mapped(dataset, *functions, **settings):
    hooks = tuple(Hook(function.__name__, function, **settings) for function in functions)
    return MapDataset(dataset, (hooks,))


def double(sample):
    return {**sample, "n": sample["n"] * 2}


def tail(sample):
    yield sample
    yield {**sample, "tail": True}


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


def test_generators_may_follow_one_another():
    items = check_resume(mapped(numbers(20), repeat_by_rest, double, tail))
    assert [(item["n"] // 2, item["copy"], "tail" in item) for item in items] == [
        (n, copy, last) for n in range(0, 20, 2) for copy in range(n % 3) for last in (False, True)
    ]


def test_a_success_forgives_the_failures_before():
    iterator = mapped(numbers(1000), fail_fives, tolerance=Tolerance(2)).open(Lane(0, 1))
    assert len(list(iterator)) == 800


def test_rows_that_killed_workers_are_left_out():
    lane = Lane(0, 1, skip_rows=frozenset({3, 4}))
    assert [item["n"] for item in mapped(numbers(8), double).open(lane)] == [0, 2, 4, 10, 12, 14]
    assert lane.counts["skipped after killing workers"] == 2


def test_progress_is_told_with_the_row_of_every_sample():
    told = []
    lane = Lane(0, 2, progress=lambda row, several: told.append((row, several)))
    list(BatchDataset(mapped(numbers(6), double), 2).open(lane))
    assert told == [(0, False), (1, False), (0, True), (2, False), (2, True)]


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        BatchDataset(numbers(5), 0)
