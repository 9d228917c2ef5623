from __future__ import annotations

import pytest

from energon.worker import WorkerConfig


def test_the_default_configuration_takes_what_decides_the_order():
    config = WorkerConfig.default_worker_config(2, lanes=8, seed_offset=3)
    assert config == WorkerConfig(rank=0, world_size=1, num_workers=2, lanes=8, seed_offset=3)


@pytest.mark.parametrize(("world_size", "warned"), [(None, False), ("1", False), ("4", True)])
def test_ranks_that_would_all_read_the_same_are_warned(monkeypatch, caplog, world_size, warned):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert WorkerConfig.default_worker_config(0).world_size == 1
    assert ("init_process_group" in caplog.text) is warned


def test_a_configuration_says_where_it_is():
    config = WorkerConfig(rank=1, world_size=4, num_workers=3, worker_log_level=1)
    assert (config.should_log(1), config.should_log(2)) == (True, False)
    assert config.config() == {"rank": 1, "world_size": 4, "num_workers": 3, "lanes": None}
