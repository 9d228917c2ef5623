from __future__ import annotations

import json
import logging

import pytest

from energon import ConfigError, WorkerConfig
from energon.stages.lane import Lane
from megatron.energon import (
    BatchDataset,
    EpochizeDataset,
    GcDataset,
    LogSampleDataset,
    MapDataset,
    WatchdogDataset,
)
from tests.commands import run_python
from tests.compat.megatron.wrappers.streams import CONFIG, ids, items, numbers


def watchers(dataset):
    return [
        LogSampleDataset(dataset, "train", CONFIG),
        GcDataset(dataset, worker_config=CONFIG, every_n_iter=2),
        WatchdogDataset(dataset, worker_config=CONFIG),
    ]


def test_watching_changes_nothing():
    for watched in watchers(BatchDataset(numbers(7), 2, ids, worker_config=CONFIG)):
        assert items(watched) == [[0, 1], [2, 3], [4, 5], [6]]


def test_states_fit_with_and_without_watchers():
    batches = BatchDataset(numbers(7), 2, ids, worker_config=CONFIG)
    for watched in watchers(batches):
        assert watched.fingerprint(3) == batches.fingerprint(3)


def test_epochs_show_through_watchers():
    for watched in watchers(EpochizeDataset(numbers(None), 5, CONFIG)):
        assert watched.virtual_epoch_length == len(watched) == 5
        assert EpochizeDataset(numbers(None), 5, CONFIG).fingerprint(1) == watched.fingerprint(1)


def test_an_epoch_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="got 0"):
        EpochizeDataset(numbers(None), 0, CONFIG)


def test_the_keys_of_items_go_to_the_log(caplog):
    caplog.set_level(logging.DEBUG, "energon")
    named = MapDataset(numbers(4), lambda s: {"__key__": f"k{s['n']}"}, worker_config=CONFIG)
    list(LogSampleDataset(named, "val", CONFIG).open(Lane(3, 4)))
    assert json.loads(caplog.messages[0]) == {
        "t": "yield_batch",
        "r": 0,
        "w": 3,
        "m": "val",
        "idx": 0,
        "keys": ["k3"],
    }


def test_the_keys_of_items_go_to_a_file_if_one_is_named(tmp_path):
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, worker_debug_path=f"{tmp_path}/{{worker_id}}.log"
    )
    list(LogSampleDataset(numbers(3), "val", config).open(Lane(0, 1)))
    lines = (tmp_path / "0.log").read_text().splitlines()
    assert [json.loads(line)["m"] for line in lines] == ["val"] * 3


SLOW = """
import time
from energon.stages.lane import Lane
from megatron.energon import MapDataset, WatchdogDataset
from tests.compat.megatron.wrappers.streams import CONFIG, ids, numbers

def slow(sample):
    time.sleep(2)
    return sample

slow_items = MapDataset(numbers(1), slow, worker_config=CONFIG)
watched = WatchdogDataset(slow_items, worker_config=CONFIG, timeout_seconds=0.5)
assert ids(watched.open(Lane(0, 1))) == [0]
"""


@pytest.mark.slow
def test_an_item_that_takes_too_long_shows_the_stacks():
    # Where other tests have left many threads behind, not all of them would be shown.
    done = run_python(SLOW)
    assert "in slow" in done.stderr
