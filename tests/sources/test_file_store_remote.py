from __future__ import annotations

import pickle

import pytest

from energon.errors import NoSuchFileError
from energon.formats.tables.part_table import part_table_path
from energon.io.files import write_bytes
from energon.sources.files.locate import SqliteLocator
from energon.sources.files.open import SystemFileStore, open_file_store
from energon.sources.files.samples import WebdatasetFileStore
from tests.datasets import make_crude
from tests.sources.distant import upload


@pytest.mark.parametrize("prepared_by", ["this", "another tool"])
def test_files_of_a_distant_dataset_are_found_by_name(s3, tmp_path, prepared_by):
    root = make_crude(tmp_path / "ds", [5, 4])
    if prepared_by == "another tool":
        for shard in root.glob("*.tar"):
            part_table_path(shard).unlink()
    upload(root, s3.address)
    store = open_file_store(f"{s3.address}/ds")
    assert isinstance(store, WebdatasetFileStore)
    assert store.get("s7.txt") == b"text 7"
    assert isinstance(store._locator.get(), SqliteLocator) == (prepared_by != "this")
    names = [f"s{n}.txt" for n in (8, 0, 4, 5, 3)]
    assert store.get_many(names) == [f"text {n}".encode() for n in (8, 0, 4, 5, 3)]
    assert pickle.loads(pickle.dumps(store)).get("s2.txt") == b"text 2"
    with store.open("s3.txt") as file:
        file.seek(5)
        assert file.read() == b"3"
        with pickle.loads(pickle.dumps(file)) as copy:
            assert copy.read() == b"text 3"
    with pytest.raises(NoSuchFileError):
        store.get("s9.txt")


def test_files_of_a_distant_folder_are_found_by_name(s3, tmp_path):
    for n in range(4):
        write_bytes(f"{s3.address}/images/{n}.txt", f"text {n}".encode())
    store = open_file_store(f"filesystem+{s3.address}/images")
    assert isinstance(store, SystemFileStore)
    assert store.get("2.txt") == b"text 2"
    assert store.get_many(["3.txt", "0.txt"]) == [b"text 3", b"text 0"]
    assert "3.txt" in store
    assert "4.txt" not in store
    with store.open("1.txt") as file:
        assert file.read() == b"text 1"
    for name in ("4.txt", "../images/1.txt", f"{s3.address}/images/1.txt"):
        with pytest.raises(NoSuchFileError):
            store.get(name)
    assert SystemFileStore().get(f"{s3.address}/images/1.txt") == b"text 1"


def test_an_empty_distant_folder_is_missing(s3):
    with pytest.raises(FileNotFoundError, match="contains no files"):
        open_file_store(f"filesystem+{s3.address}/nothing")
