"""Datasets of thousands of shards open few files, when they are opened and while they are read."""

from __future__ import annotations

import os
import resource
from itertools import islice

import pytest

from energon import DefaultTaskEncoder, WorkerConfig, get_train_dataset, get_val_dataset
from energon.formats.meta.info import DatasetInfo, Split
from energon.formats.meta.yaml import dump_yaml
from energon.local_file import MAX_OPEN_FILES, open_files_limit
from energon.stages.lane import Lane
from tests.datasets import make_crude
from tests.opened_files import opened_files

SHARDS = 3_000
SAMPLES = 4


class Keys(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return [(sample["__shard__"], sample["__key__"]) for sample in samples]


def make_linked(root, shards):
    """A dataset whose shards are all links to one."""
    make_crude(root, [SAMPLES])
    names = [f"{number:05}.tar" for number in range(shards)]
    for name in names[1:]:
        for ending in ("", ".idx", ".parts"):
            os.link(root / f"000.tar{ending}", root / f"{name}{ending}")
    names[0] = "000.tar"
    meta = root / ".nv-meta"
    (meta / ".info.json").write_text(DatasetInfo(dict.fromkeys(names, SAMPLES)).to_json())
    (meta / "split.yaml").write_text(Split({"train": names, "val": names}).to_yaml())
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_linked(tmp_path_factory.mktemp("many") / "ds", SHARDS)


def config(**settings):
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, "lanes": 4, **settings})


def train(path, **settings):
    return get_train_dataset(
        path, worker_config=config(), batch_size=8, task_encoder=Keys(), **settings
    )


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("get", [get_train_dataset, get_val_dataset])
def test_opening_a_dataset_opens_its_description_and_no_shard(root, get):
    with opened_files() as files:
        dataset = get(root, worker_config=config(), batch_size=8, task_encoder=Keys())
        iterators = [dataset.open_lane(Lane(lane, 4)) for lane in range(4)]
        len(dataset)
        dataset.fingerprint(4)
    assert len(iterators) == 4
    assert not [path for path in files if ".tar" in path]
    assert len([path for path in files if str(root) in path]) <= 8


def test_the_first_batch_opens_no_more_shards_than_it_has_samples(root):
    dataset = train(root)
    with opened_files() as files:
        (batch,) = islice(dataset.open_lane(Lane(0, 4)), 1)
    shards = {path for path in files if path.endswith(".tar")}
    assert {shard for shard, _ in batch} <= {os.path.basename(path) for path in shards}
    assert len(shards) <= 8
    assert len([path for path in files if str(root) in path]) <= 2 * len(shards)


def test_excluded_samples_open_the_shards_that_they_are_in(root):
    split = Split({"train": ["000.tar", "0{0001..2999}.tar"]}, exclude=["00007.tar/s1"])
    (root / ".nv-meta/some.yaml").write_text(split.to_yaml())
    with opened_files() as files:
        dataset = train(root, split_config="some.yaml")
    assert dataset.plan.leaves[0].num_samples == SHARDS * SAMPLES - 1
    assert {os.path.basename(path) for path in files if ".tar" in path} == {
        "00007.tar",
        "00007.tar.parts",
    }


@pytest.mark.slow
def test_reading_everything_keeps_few_files_open(root):
    before = descriptors()
    dataset = get_val_dataset(root, worker_config=config(), batch_size=600, task_encoder=Keys())
    seen, most = 0, before
    for batch in dataset.open_lane(Lane(0, 1)):
        seen += len(batch)
        most = max(most, descriptors())
    assert seen == SHARDS * SAMPLES
    assert most <= before + min(MAX_OPEN_FILES, open_files_limit() // 2)
    del dataset, batch
    assert descriptors() <= before + 2


@pytest.mark.slow
def test_many_datasets_keep_no_more_files_open_than_one(tmp_path):
    """A blend of datasets that together have more shards than a process may open files."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number, shards = 12, 200
    for leaf in range(number):
        make_linked(tmp_path / f"ds{leaf}", shards)
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": [{"path": f"ds{leaf}"} for leaf in range(number)]}},
    }
    path = tmp_path / "blend.yaml"
    path.write_text(dump_yaml(document))
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 400, hard))
    try:
        before = descriptors()
        dataset = train(path, max_samples_per_sequence=1)
        seen, most = set(), before
        for batch in islice(dataset.open_lane(Lane(0, 1)), 2_000):
            seen.update(batch)
            most = max(most, descriptors())
        assert most <= before + open_files_limit() // 2
        assert len(seen) == shards * SAMPLES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
