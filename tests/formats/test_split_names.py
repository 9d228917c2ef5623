"""The split for validation is found whatever it is called, if there is only one."""

from __future__ import annotations

import pytest

from energon import WorkerConfig, get_val_dataset, get_val_datasets
from energon.errors import ConfigError
from energon.formats.meta.info import find_split
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.datasets import make_crude

ARGUMENTS = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": None}


def keys(path, **arguments):
    return [sample["__key__"] for sample in get_val_dataset(path, **ARGUMENTS, **arguments)]


def split(root, *parts, **settings):
    prepare_dataset(root, split_parts=[f"{part}:.*" for part in parts], **settings)
    return root


@pytest.mark.parametrize("name", ["val", "validation", "valid", "dev"])
def test_the_getters_find_it(tmp_path, name):
    root = split(make_crude(tmp_path / "ds", [3]), "train", name)
    assert keys(root) == ["s0", "s1", "s2"]
    assert keys(root, split_part="validation") == ["s0", "s1", "s2"]
    ((pipeline, _),) = get_val_datasets(root, **ARGUMENTS)
    assert len(list(pipeline)) == 3


def test_samples_of_shared_shards_are_those_of_the_split(tmp_path):
    root = make_crude(tmp_path / "ds", [10])
    prepare_dataset(root, split_ratio={"train": 7, "dev": 3})
    assert keys(root) == ["s7", "s8", "s9"]


def test_metadatasets_and_jsonl_files_have_it_too(tmp_path):
    split(make_crude(tmp_path / "ds", [3]), "train", "valid")
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n' * 4)
    prepare_jsonl(tmp_path / "a.jsonl", split_ratio={"train": 1, "dev": 1})
    assert keys(tmp_path / "a.jsonl") == ["2", "3"]
    (tmp_path / "blend.yaml").write_text(
        "splits: {train: {path: ds}, validation: {concat: [{path: ds}, {path: a.jsonl}]}}\n"
    )
    assert keys(tmp_path / "blend.yaml") == ["s0", "s1", "s2", "2", "3"]


def test_of_several_none_is_chosen(tmp_path):
    root = split(make_crude(tmp_path / "ds", [1]), "train", "dev", "validation")
    with pytest.raises(ConfigError, match="no split 'val', only 'train', 'dev', 'validation'"):
        keys(root)
    root = split(root, "train", "test")
    with pytest.raises(ConfigError, match="no split 'val'"):
        keys(root)


def test_other_splits_go_by_their_names_alone():
    assert find_split("training", ["train"]) is None
    assert find_split("val", ["val", "validation"]) == "val"
    assert find_split("holdout", ["val"]) is None
