"""A blend of hundreds of datasets opens little, and opens it once."""

from __future__ import annotations

import os
import tracemalloc
from collections import Counter
from itertools import islice

import pytest

from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.io.backends import local
from tests.datasets import make_crude
from tests.opened_files import opened_files

LEAVES = 300
MAX_OPEN = 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("many")
    make_crude(root / "d000", [6])
    for number in range(1, LEAVES):
        os.symlink(root / "d000", root / f"d{number:03}")
    entries = "".join(f"    - {{path: d{n:03}, weight: {n % 7 + 1}}}\n" for n in range(LEAVES))
    (root / "m.yaml").write_text("splits:\n  train:\n    blend:\n" + entries)
    return root / "m.yaml"


class Keys(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [sample["__restore_key__"][0] for sample in samples]


def open_dataset(path):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=8)
    return get_train_dataset(path, worker_config=config, batch_size=32, task_encoder=Keys())


def test_each_file_is_read_once_and_no_shard_before_it_is_needed(path):
    with opened_files() as files:
        dataset = open_dataset(path)
    assert len(dataset.plan.leaves) == LEAVES
    assert len(set(files)) == len(files)
    assert len([name for name in files if ".nv-meta" in name]) == 3 * LEAVES
    assert not [name for name in files if name.endswith((".tar", ".parts"))]


@pytest.mark.slow
def test_the_number_of_datasets_does_not_multiply_descriptors(path, monkeypatch):
    monkeypatch.setattr(local, "MAX_OPEN_FILES", MAX_OPEN)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    drawn: Counter[int] = Counter()
    for batch in islice(iter(get_loader(open_dataset(path))), 100):
        drawn.update(batch)
        most = max(most, len(os.listdir("/proc/self/fd")))
    assert most <= before + MAX_OPEN + 4
    assert len(drawn) > 0.95 * LEAVES
    total = sum(n % 7 + 1 for n in range(LEAVES))
    for leaf, count in drawn.items():
        assert abs(count - 3200 * (leaf % 7 + 1) / total) <= 8


@pytest.mark.slow
def test_a_dataset_takes_a_few_kilobytes_and_reading_it_no_more(path):
    # Names of paths are interned: let Python's table of them grow before it is measured.
    before = open_dataset(path)
    tracemalloc.start()
    try:
        loader = get_loader(open_dataset(path))
        opened, _ = tracemalloc.get_traced_memory()
        for _ in islice(iter(loader), 40):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert opened < LEAVES * 10_000
    # A block of samples, and the span of 512 KiB that its parts are cut from.
    assert peak < opened + 8.5e6
    assert len(before.plan.leaves) == LEAVES
