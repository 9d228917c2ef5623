from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import StateError
from energon.stages.blocks import MAX_BLOCK_BYTES, MAX_PLANNED_ROWS
from energon.stages.lane import Lane
from energon.testing import check_resume
from tests.stages.numbers import numbers


def test_resumes_at_every_position():
    assert [sample["n"] for sample in check_resume(numbers(60))] == list(range(0, 60, 2))


@given(st.lists(st.integers(1, 700), min_size=1, max_size=20))
def test_takes_of_any_size_give_the_same_stream(counts):
    taken = numbers(5_000).open(Lane(1, 3))
    single = numbers(5_000).open(Lane(1, 3))
    for count in counts:
        wanted = [sample for _, sample in zip(range(count), single, strict=False)]
        assert taken.take(count) == wanted
        assert taken.row == single.row


def test_a_take_beyond_the_end_gives_what_is_left():
    iterator = numbers(10).open(Lane(0, 2))
    assert len(iterator.take(100)) == 5
    assert iterator.take(1) == []
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_first_block_is_as_small_as_asked_and_blocks_grow():
    dataset = numbers(None)
    iterator = dataset.open(Lane(0, 1))
    for _ in range(1000):
        iterator.take(32)
    reads = dataset.reader.reads
    assert reads[0] == 32
    assert reads == sorted(reads)
    assert reads[-1] == MAX_PLANNED_ROWS


def test_blocks_are_bounded_by_bytes():
    dataset = numbers(None, mean_sample_bytes=MAX_BLOCK_BYTES / 4)
    iterator = dataset.open(Lane(0, 1))
    assert [sample["n"] for sample in iterator.take(30)] == list(range(30))
    assert max(dataset.reader.reads) == 4


def test_refuses_the_state_of_another_stage():
    with pytest.raises(StateError, match="another pipeline"):
        numbers(5).open(Lane(0, 1), {"place": 3})
