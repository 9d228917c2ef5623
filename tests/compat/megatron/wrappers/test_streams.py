from __future__ import annotations

import pytest

from energon.stages.lane import Lane
from megatron.energon import (
    ConcatDataset,
    LimitDataset,
    RepeatDataset,
    ShuffleBufferDataset,
)
from tests.compat.megatron.wrappers.streams import CONFIG, ids, items, numbers


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"repeats": 2}, [0, 1, 2, 3] * 2),
        ({"repeats": 1.5}, [0, 1, 2, 3, 0, 1]),
        ({"restart": False}, [0, 1, 2, 3]),
        ({"restart": False, "repeats": 0.5}, [0, 1]),
    ],
)
def test_repetitions(settings, expected):
    assert ids(items(RepeatDataset(numbers(4), worker_config=CONFIG, **settings))) == expected


def test_a_shuffle_buffer():
    shuffled = ids(items(ShuffleBufferDataset(numbers(40), 10, worker_config=CONFIG)))
    assert sorted(shuffled) == list(range(40)) != shuffled


def test_endless_data_have_no_length():
    endless = RepeatDataset(numbers(4), worker_config=CONFIG)
    assert endless
    with pytest.raises(TypeError, match="RepeatDataset has no end"):
        len(endless)


def test_lengths_are_those_of_the_rank_and_of_a_worker():
    limited = LimitDataset(numbers(None), 7, worker_config=CONFIG)
    assert len(limited) == limited.len_rank() == limited.len_worker() == 7


def test_the_configuration_names_all_stages():
    limited = LimitDataset(ConcatDataset(numbers(2), worker_config=CONFIG), 1, worker_config=CONFIG)
    assert limited.config() == {
        "type": "LimitDataset",
        "length": 1,
        "datasets": [{"type": "ConcatDataset", "datasets": [{"type": "ReadDataset"}]}],
    }


def test_a_single_sample_can_be_made_again():
    concat = ConcatDataset(numbers(9), worker_config=CONFIG)
    assert concat.can_restore_sample()
    assert concat.restore_sample([0, 0, 5])["n"] == 5
    with pytest.raises(ValueError, match="not a restore key"):
        concat.restore_sample("key")


def test_nothing_is_read_before_the_first_item():
    stream = ShuffleBufferDataset(numbers(None), 4, worker_config=CONFIG)
    iterator = stream.open(Lane(0, 1))
    assert iterator.row == 0
