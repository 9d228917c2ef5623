from __future__ import annotations

import pytest

from energon.prepare.dataset import prepare_dataset
from energon.sources.files.locate import KeyIndex, TableLocator, shared_index
from energon.sources.shards import ShardPool
from tests.datasets import CRUDE, make_crude, write_shard

COUNTS = {"000.tar": 3, "001.tar": 2}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    return make_crude(tmp_path / "ds", list(COUNTS.values()))


class Maker:
    """Makes the index of a dataset, and counts how often."""

    def __init__(self, root):
        self.root = root
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return TableLocator(self.root, ShardPool())._make_index()


def places(index):
    return {n: list(index.find(f"s{n}".encode())) for n in range(5)}


EXPECTED = {0: [(0, 0)], 1: [(0, 1)], 2: [(0, 2)], 3: [(1, 0)], 4: [(1, 1)]}


def open_index(root, make, counts=None):
    return shared_index(root, counts or COUNTS, make, shared_samples=1)


def test_an_index_is_made_once_and_mapped_by_all(cache, root):
    make = Maker(root)
    for _ in range(3):
        assert places(open_index(root, make)) == EXPECTED
    assert make.calls == 1


def test_small_indexes_are_made_in_memory(cache, root):
    make = Maker(root)
    assert places(shared_index(root, COUNTS, make)) == EXPECTED
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"EKEYS", b"x" * 24])
def test_a_damaged_file_is_made_again(cache, root, damage):
    make = Maker(root)
    open_index(root, make)
    (file,) = (path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 80)
    file.write_bytes(damage)
    assert places(open_index(root, make)) == EXPECTED
    assert make.calls == 2


def test_a_dataset_that_was_prepared_anew_has_an_index_of_its_own(cache, root):
    make = Maker(root)
    open_index(root, make)
    write_shard(root / "001.tar", [("new", {"txt": b""}), ("s9", {"txt": b""})])
    prepare_dataset(root, **CRUDE)
    index = open_index(root, make)
    assert list(index.find(b"new")) == [(1, 0)]
    assert list(index.find(b"s4")) == []


def test_without_a_mark_of_its_preparation_nothing_is_kept(cache, root):
    (root / ".nv-meta/index.uuid").unlink()
    assert places(open_index(root, Maker(root))) == EXPECTED
    assert not cache.exists()


def test_a_folder_that_cannot_be_made_costs_memory_only(root, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "file/cache"))
    assert places(open_index(root, Maker(root))) == EXPECTED
    assert "is loaded in every process" in caplog.text


def test_an_index_of_nothing_finds_nothing():
    index = KeyIndex.from_buffer(KeyIndex([]).to_bytes(), origin="nothing")
    assert len(index) == 0
    assert list(index.find(b"a")) == []
