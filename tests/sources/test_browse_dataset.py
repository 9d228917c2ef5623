from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.formats.meta.info import DatasetInfo
from energon.formats.tables.part_table import PartTable, part_table_path
from energon.formats.tar.headers import split_name
from energon.formats.tar.scan import scan_tar
from energon.prepare.dataset import prepare_dataset
from energon.sources.open_tree import (
    FlatFolder,
    SampleFolder,
    SqliteSamples,
    TableSamples,
    open_samples,
)
from energon.sources.shards import ShardPool
from energon.sources.tree import BrowsedFile, find_path
from tests.datasets import CRUDE
from tests.effort import mixed

FOLDERS = [FlatFolder, SampleFolder]


def write_names(path, names):
    """A shard of members whose content is their name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name in names:
            data = name.encode("utf-8", "surrogateescape")
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def prepare(root, *shards):
    for number, names in enumerate(shards):
        write_names(root / f"{number}.tar", names)
    prepare_dataset(root, **CRUDE)
    return root


def index_as_it_is(root, *shards):
    """The index of a dataset that preparing would refuse."""
    counts = {}
    for number, names in enumerate(shards):
        path = root / f"{number}.tar"
        write_names(path, names)
        scan = scan_tar(path)
        table = PartTable.from_scan(scan, shard_mtime_ns=path.stat().st_mtime_ns)
        part_table_path(path).write_bytes(table.to_bytes())
        counts[path.name] = scan.num_samples
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/.info.json").write_text(DatasetInfo(counts).to_json())
    return root


def without_tables(root):
    """A dataset as other tools prepare it."""
    for table in root.rglob("*.parts"):
        table.unlink()
    return root


def walk(folder, path=""):
    """All files by path, each found by the path, not by what was listed."""
    found = {}
    for name, is_folder in folder.entries():
        here = f"{path}/{name}"
        assert here not in found, "each name once"
        inner = folder.find(name)
        assert inner is not None, here
        assert isinstance(inner, BrowsedFile) != is_folder
        found |= walk(inner, here) if is_folder else {here: inner.read().decode()}
    return found


def open_tree(root, kind=FlatFolder):
    samples = open_samples(root, ShardPool())
    return kind(samples)


@pytest.mark.parametrize(("kind", "index"), mixed([*FOLDERS], ["tables", "sqlite"]))
def test_folders_of_keys_spread_over_shards_are_one_folder(tmp_path, kind, index):
    root = prepare(tmp_path, ["a/1.txt", "a/b/2.txt", "3.txt"], ["a/4.txt", "a/4.jpg", "a0.txt"])
    samples = open_samples(without_tables(root) if index == "sqlite" else root, ShardPool())
    assert isinstance(samples, SqliteSamples if index == "sqlite" else TableSamples)
    found = walk(kind(samples))
    wanted = ["a/1.txt", "a/b/2.txt", "3.txt", "a/4.txt", "a/4.jpg", "a0.txt"]
    if kind is SampleFolder:
        assert {path.rpartition("/")[0] + "." + path.rpartition("/")[2] for path in found} == {
            f"/{name}" for name in wanted
        }
    else:
        assert set(found) == {f"/{name}" for name in wanted}
    assert sorted(found.values()) == sorted(wanted)


@pytest.mark.parametrize(("kind", "index"), mixed([*FOLDERS], ["tables", "sqlite"]))
def test_files_and_folders_of_the_same_name_are_both_there(tmp_path, kind, index):
    # As a sample: key "n/m" with the part "0" beside the key "n/m/0"; as a file: "x.jpg" beside
    # the folder "x.jpg".
    names = ["n/m.0", "n/m/0.txt", "x.jpg", "x.jpg/1.txt", "y.jpg", "y.jpg/2.txt"]
    root = prepare(tmp_path, names)
    found = walk(open_tree(without_tables(root) if index == "sqlite" else root, kind))
    assert sorted(found.values()) == sorted(names)


@pytest.mark.parametrize("kind", FOLDERS)
def test_samples_with_the_same_key_are_all_there(tmp_path, kind):
    names = ["a.txt", "b.txt"], ["c.txt", "a.txt", "a.jpg"], ["a.txt"]
    found = walk(open_tree(index_as_it_is(tmp_path, *names), kind))
    assert sorted(found.values()) == ["a.jpg", "a.txt", "a.txt", "a.txt", "b.txt", "c.txt"]
    separator = "." if kind is FlatFolder else "/"
    assert f"/a{separator}txt" in found


def test_shards_that_are_missing_are_left_out_with_a_warning(tmp_path, caplog):
    root = prepare(tmp_path, ["a.txt"], ["b.txt"])
    (root / "0.tar").unlink()
    tree = open_tree(root)
    assert list(walk(tree).values()) == ["b.txt"]
    assert tree.find("a.txt") is None
    assert "0.tar" in caplog.text


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_is_not_there_is_not_found(tmp_path, kind):
    tree = open_tree(prepare(tmp_path, ["a/b.txt", "c.txt"]), kind)
    for path in ("x", "c", "c.jpg", "a/b/c", "a/x", "c.txt/x", "%", "..", "a/..", "\udcff.txt"):
        found = find_path(tree, path)
        assert found is None or (kind is SampleFolder and path == "c")


steps = st.text(st.sampled_from(["a", "b", "%", ".", "é"]), min_size=0, max_size=3)
member_names = st.lists(steps, min_size=1, max_size=4).map("/".join)


@given(st.lists(member_names, min_size=1, max_size=12, unique=True))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_part_is_shown_once_whatever_its_name(tmp_path_factory, kind, names):
    by_key = {}
    for name in names:
        if split_name(name) is not None and not name.endswith("/"):
            by_key.setdefault(split_name(name)[0], []).append(name)
    ordered = [name for some in by_key.values() for name in some]
    if not ordered:
        return
    root = index_as_it_is(tmp_path_factory.mktemp("ds"), ordered)
    assert sorted(walk(open_tree(root, kind)).values()) == sorted(ordered)


def test_long_names_are_found(tmp_path):
    names = ["x" * 600 + ".txt", "y" * 600 + "/" + "z" * 600 + ".txt"]
    found = walk(open_tree(prepare(tmp_path, names)))
    assert sorted(found.values()) == names
    assert max(len(step) for path in found for step in path.split("/")) <= 255


@pytest.mark.slow
def test_a_listing_of_many_samples_takes_few_look_ups(tmp_path):
    root = prepare(tmp_path, [f"k{n:05}.txt" for n in range(3000)])
    names = [name for name, _ in open_tree(root).entries()]
    assert names == sorted(names)
    assert len(np.unique(names)) == 3000
    assert walk(open_tree(without_tables(root))).keys() == {f"/{name}" for name in names}
