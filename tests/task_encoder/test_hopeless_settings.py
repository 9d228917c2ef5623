"""Settings that cannot do what they are there for are told, once."""

from __future__ import annotations

import os
import tarfile

import pytest

from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_crude


class Plain(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return len(samples)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "energon"]


def test_what_is_larger_than_the_data(tmp_path, caplog):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    settings = {"batch_size": 64, "shuffle_buffer_size": 1000}
    for _ in range(2):
        dataset = get_train_dataset(
            make_crude(tmp_path / "tiny", [10]),
            worker_config=config,
            task_encoder=Plain(),
            **settings,
        )
    assert next(iter(dataset)) == 64
    batch, window = said(caplog)
    assert "batch_size=64 is more than the 10 samples of" in batch
    assert "shuffle_buffer_size=1000 is more than the 10 samples of" in window


@pytest.mark.parametrize(
    ("settings", "sizes", "outcome"),
    [
        ({}, [10], "the only batch of a pass is smaller"),
        ({"batch_drop_last": True}, [], "batch_drop_last=True leaves no batch at all"),
    ],
)
def test_a_pass_that_is_smaller_than_a_batch(settings, sizes, outcome, tmp_path, caplog):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    root = make_crude(tmp_path / f"tiny-{len(sizes)}", [10])  # a name is warned of once
    settings = {"batch_size": 64, "repeat": False, "task_encoder": Plain(), **settings}
    dataset = get_train_dataset(root, worker_config=config, **settings)
    assert list(get_loader(dataset)) == sizes
    (line,) = said(caplog)
    assert line.endswith(f": {outcome}")


def test_workers_that_have_no_lane(tmp_path, caplog):
    config = WorkerConfig(rank=0, world_size=1, num_workers=7, lanes=2)
    dataset = get_train_dataset(
        make_crude(tmp_path / "ds", [50]), worker_config=config, batch_size=2, task_encoder=Plain()
    )
    with get_loader(dataset, workers="thread") as loader:
        next(iter(loader))
    assert any("5 of 7 workers have nothing to do" in line for line in said(caplog))


def test_more_open_slices_than_memory(tmp_path, caplog):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(7 << 30, memory // 8)
    (tmp_path / "ds").mkdir()
    with open(tmp_path / "ds/0.tar", "wb") as file:
        for number in range(2 * memory // size):
            entry = tarfile.TarInfo(f"s{number:03}.bin")
            entry.size = size
            file.write(entry.tobuf())
            file.seek(-(-size // 512) * 512, os.SEEK_CUR)  # holes take nothing of the disk
        file.truncate(file.tell() + 1024)
    prepare_dataset(tmp_path / "ds", split_parts=["train:.*"], sample_type="CrudeWebdataset")
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for settings in ({}, {"parallel_shard_iters": 1000, "max_samples_per_sequence": 100}):
        assert not said(caplog)
        get_train_dataset(
            tmp_path / "ds", worker_config=config, batch_size=2, task_encoder=Plain(), **settings
        )
    (line,) = said(caplog)
    assert "the open slices of ds/train have" in line
    assert "Lower parallel_shard_iters, max_samples_per_sequence or the number of lanes" in line
