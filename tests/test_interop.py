"""A dataset that Megatron-Energon 7.4.1 prepared, kept as it was; see docs/migration.md."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from energon import WorkerConfig, get_loader, get_train_dataset, get_val_dataset
from energon.formats.meta.info import load_info, load_split
from energon.formats.tar.scan import load_tar_index
from energon.prepare.dataset import prepare_dataset

THEIRS = Path(__file__).parent / "data" / "energon7"
SHARDS = ["shards/shard_000.tar", "shards/shard_001.tar", "shards/shard_002.tar"]
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    for shard in SHARDS:
        (root / shard).parent.mkdir(exist_ok=True)
        shutil.copy(THEIRS / shard, root / shard)
    prepare_dataset(
        root,
        split_parts=["train:shards/shard_00[01]", "test:shards/shard_002"],
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )
    return root


def test_what_they_prepared_loads_here():
    dataset = get_val_dataset(THEIRS, split_part="train", worker_config=CONFIG, batch_size=4)
    batches = list(get_loader(dataset))
    assert [key for batch in batches for key in batch.__key__] == [
        f"sample_{n:04}" for n in range(9)
    ]
    assert batches[0].caption == ["caption 0", "caption 1", "caption 2", "caption 3"]
    assert batches[0].image.shape == (4, 3, 6, 8)


def test_what_they_prepared_trains_here():
    dataset = get_train_dataset(THEIRS, worker_config=CONFIG, batch_size=3)
    batches = iter(get_loader(dataset))
    epoch = [key for _ in range(3) for key in next(batches).__key__]
    assert sorted(epoch) == [f"sample_{n:04}" for n in range(9)]


def test_our_sample_indexes_are_the_same_to_the_byte(ours):
    for shard in SHARDS:
        name = f"{shard}.idx"
        assert (ours / name).read_bytes() == (THEIRS / name).read_bytes()
        assert load_tar_index(THEIRS / name)[0] == 0


def test_our_sql_index_has_the_same_rows(ours):
    for table in ("samples", "sample_parts"):
        rows = []
        for root in (ours, THEIRS):
            connection = sqlite3.connect(root / ".nv-meta/index.sqlite")
            rows.append(sorted(connection.execute(f"SELECT * FROM {table}")))
            connection.close()
        assert rows[0] == rows[1]
        assert rows[0]


def test_shards_and_splits_read_the_same(ours):
    assert load_info(ours).shard_counts == load_info(THEIRS).shard_counts
    assert list(load_info(ours).shard_counts) == list(load_info(THEIRS).shard_counts)
    for split_part in ("train", "test"):
        found = load_split(THEIRS).shards(split_part)
        assert load_split(ours).shards(split_part) == found
    assert load_info(THEIRS).energon_version == "7.4.1"
