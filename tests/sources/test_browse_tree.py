from __future__ import annotations

import json

import pytest

from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.files import write_bytes
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.open_tree import TreeOpener
from energon.sources.tree import BrowsedFile, find_path
from tests.datasets import make_crude


def content(folder):
    """All files below a folder, by path."""
    found = {}
    for name, is_folder in folder.entries():
        inner = folder.find(name)
        assert isinstance(inner, BrowsedFile) != is_folder
        if isinstance(inner, BrowsedFile):
            found[name] = inner.read()
        else:
            found |= {f"{name}/{rest}": data for rest, data in content(inner).items()}
    return found


@pytest.fixture
def root(tmp_path):
    make_crude(tmp_path / "ds", [2])
    make_crude(tmp_path / "other" / "ds", [1], prefix="t")
    (tmp_path / "files" / "deep").mkdir(parents=True)
    (tmp_path / "files" / "deep" / "x.txt").write_text("x")
    (tmp_path / "lines.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    prepare_jsonl(tmp_path / "lines.jsonl")
    (tmp_path / "meta.yaml").write_text(
        """
        splits:
          train:
            blend:
              - path: ds
                aux: {files: "filesystem://files", lines: lines.jsonl}
              - path: other/ds
          val: {path: lines.jsonl}
        """
    )
    return tmp_path


def test_a_metadataset_shows_its_datasets_and_auxiliary_data(root):
    assert content(TreeOpener().open(root / "meta.yaml")) == {
        "train/ds/s0.txt": b"text 0",
        "train/ds/s1.txt": b"text 1",
        "train/ds.aux/files/deep/x.txt": b"x",
        "train/ds.aux/lines/0.json": b'{"n": 0}\n',
        "train/ds.aux/lines/1.json": b'{"n": 1}\n',
        "train/ds#2/t0.txt": b"text 0",
        "val/lines.jsonl/0.json": b'{"n": 0}\n',
        "val/lines.jsonl/1.json": b'{"n": 1}\n',
    }


def test_samples_of_a_metadataset_may_be_folders(root):
    tree = TreeOpener(sample_folders=True).open(root / "meta.yaml")
    assert find_path(tree, "/train/ds/s1/txt").read() == b"text 1"


def test_a_jsonl_file_shows_its_lines(root):
    tree = TreeOpener().open(root / "lines.jsonl")
    assert [json.loads(data) for data in content(tree).values()] == [{"n": 0}, {"n": 1}]
    for name in ("2.json", "01.json", "0.txt", "-1.json", "x.json"):
        assert tree.find(name) is None


def test_a_folder_is_never_left(root):
    tree = TreeOpener().open(f"filesystem://{root}/files/deep")
    for name in ("..", ".", "", "../deep/x.txt", "absent"):
        assert tree.find(name) is None
    assert find_path(tree, "x.txt").read() == b"x"


def test_a_distant_folder_is_listed_when_somebody_looks(s3):
    write_bytes(f"{s3.address}/files/a/1.txt", b"one")
    write_bytes(f"{s3.address}/files/2.txt", b"two")
    tree = TreeOpener().open(f"filesystem+{s3.address}/files")
    assert content(tree) == {"a/1.txt": b"one", "2.txt": b"two"}
    assert find_path(tree, "a/2.txt") is None


def test_what_is_not_there_or_no_dataset_is_an_error(root):
    with pytest.raises(DatasetNotFoundError):
        TreeOpener().open(root / "absent")
    (root / "plain" / ".nv-meta").mkdir(parents=True)
    (root / "plain" / ".nv-meta" / "index.sqlite").touch()
    with pytest.raises(ConfigError, match="is a folder already"):
        TreeOpener().open(root / "plain")
