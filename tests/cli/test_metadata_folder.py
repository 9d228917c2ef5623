"""Whoever names the metadata of a dataset is told the address of the dataset."""

from __future__ import annotations

import pytest

from energon import WorkerConfig, get_train_dataset, get_val_dataset
from energon.errors import DatasetNotFoundError
from tests.commands import ok, run
from tests.datasets import make_captions
from tests.effort import mixed

COMMANDS = {
    "info": (),
    "lint": (),
    "plan": (),
    "preview": (),
    "prepare": ("--split-ratio", "1", "--non-interactive"),
    "prepare-media": ("--media-metadata-by-extension",),
    "index": (),
    "verify": (),
    "repair": (),
    "mount": ("out",),
    "pack": ("out",),
}
NAMES = ["", "/split.yaml", "/dataset.yaml", "/.info.json", "/index.sqlite"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_captions(tmp_path_factory.mktemp("metadata") / "ds", [2, 2])


@pytest.mark.parametrize(("command", "name"), mixed([*COMMANDS], ["", "/.info.json"]))
def test_every_command_names_the_dataset(root, command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    before = sorted(root.rglob("*"))
    done = run(command, f"{root}/.nv-meta{name}", *COMMANDS[command])
    assert done.exit_code == 2, done.output
    assert f"is metadata of a prepared dataset; name the dataset itself, {root}" in done.output
    assert sorted(root.rglob("*")) == before
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("name", "getter"), mixed([*NAMES], [get_train_dataset, get_val_dataset]))
def test_getters_do_so_too(root, name, getter):
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    with pytest.raises(DatasetNotFoundError, match=f"name the dataset itself, {root}$"):
        getter(f"{root}/.nv-meta{name}", worker_config=alone, batch_size=1)


@pytest.mark.parametrize("name", ["shards", "shards/000.tar"])
def test_shards_belong_to_their_dataset(root, name):
    done = run("info", root / name)
    assert done.exit_code == 2
    assert f"{name} is part of a prepared dataset; name the dataset itself, {root}" in done.output


def test_a_metadataset_may_lie_there(root, tmp_path):
    path = root / ".nv-meta/blend.yaml"
    path.write_text("splits: {train: {path: ..}}\n")
    ok("info", path, "--no-parts")
    path.unlink()


def test_a_folder_of_that_name_without_a_dataset_is_a_folder(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    done = run("info", tmp_path / ".nv-meta")
    assert "holds no files" in done.output
