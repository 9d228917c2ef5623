from __future__ import annotations

import os
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from energon.errors import DatasetNotFoundError, ObjectChangedError, StorageError, TruncatedError
from energon.formats.tables.sqlite_file import SqliteReader
from energon.io import files
from energon.io.backends import local
from energon.io.backends.local import OpenFile
from energon.local_file import map_file, release_pages
from energon.metadataset.kind import dataset_kind


@pytest.fixture
def three_open(monkeypatch):
    """Lets three files be open at a time."""
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 3)
    monkeypatch.setattr(OpenFile, "_kept", deque())


def make_files(folder, count):
    for number in range(count):
        (folder / str(number)).write_bytes(bytes([number]) * 1000)
    return [OpenFile(str(folder / str(number))) for number in range(count)]


def num_open(folder):
    """The number of files below a folder that this process has open, whatever else it has."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(f"{folder}/") for link in links)


def test_reads_exact_ranges_with_few_open_files_in_many_threads(tmp_path, three_open):
    opened = make_files(tmp_path, 20)
    assert num_open(tmp_path) <= 3

    def read(number):
        return opened[number % 20].pread(10, 100)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(2_000)))
    assert found == [bytes([number % 20]) * 100 for number in range(2_000)]
    assert num_open(tmp_path) <= 3
    opened.clear()
    assert num_open(tmp_path) == 0


def test_a_file_that_is_being_read_stays_open(tmp_path, three_open):
    opened = make_files(tmp_path, 12)
    held = opened[0]._descriptor()
    for file in opened[1:]:
        file.pread(0, 1)
    assert opened[0]._held is not held
    assert os.pread(held.number, 1, 0) == b"\0"


@pytest.mark.parametrize("change", ["replace", "rewrite"])
def test_a_file_that_is_another_one_when_it_is_opened_again_is_not_read(
    tmp_path, three_open, change
):
    files = make_files(tmp_path, 8)
    if change == "replace":
        (tmp_path / "new").write_bytes(b"new" * 1000)
        os.replace(tmp_path / "new", tmp_path / "0")
    else:
        (tmp_path / "0").write_bytes(b"new" * 1000)
    with pytest.raises(ObjectChangedError, match="0: was replaced since it was opened"):
        files[0].pread(0, 10)


def test_a_file_is_opened_again_after_the_program_went_to_another_folder(
    tmp_path, three_open, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path, 8)
    files = [OpenFile(str(number)) for number in range(8)]
    monkeypatch.chdir("/")
    assert [file.pread(0, 1)[0] for file in files] == list(range(8))


def test_pipes_and_devices_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "0.tar")
    with pytest.raises(StorageError, match="is a pipe, expected a regular file"):
        SqliteReader(tmp_path / "0.tar")
    with pytest.raises(DatasetNotFoundError, match="it is not a regular file"):
        dataset_kind(str(tmp_path / "0.tar"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "1.tar"))
        kinds = {"0.tar": "a pipe", "1.tar": "a socket", "/dev/zero": "a device"}
        for name, kind in kinds.items():
            for read in (OpenFile, files.read_bytes, files.read_document):
                with pytest.raises(StorageError, match=f"is {kind}, expected a regular file"):
                    read(str(tmp_path / name))


def test_mapped_files_need_no_descriptor_and_end_with_their_last_view(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 100)
    before = len(os.listdir("/proc/self/fd"))
    views = [map_file(path) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(path)) == 50
    release_pages(views[0])
    assert all(bytes(view) == path.read_bytes() for view in views)
    part = views[7][255:257]
    views.clear()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    assert bytes(part) == b"\xff\0"
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.write_bytes(b"")
    assert map_file(path) == b""


def test_a_short_file_says_where_it_ends(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"12345")
    with pytest.raises(
        TruncatedError, match=r"x\.tar: ends at byte 5, expected 10 bytes from byte 2"
    ):
        OpenFile(str(path)).pread(2, 10)


def test_a_size_that_cannot_be_takes_no_memory(tmp_path):
    (tmp_path / "x").write_bytes(b"x" * 10)
    for offset, size in ((0, 1 << 40), (5, 1 << 62), (1 << 62, 1 << 62), (1 << 62, 3)):
        with pytest.raises(TruncatedError, match=f"x: ends at byte .*, expected {size} bytes"):
            OpenFile(str(tmp_path / "x")).pread(offset, size)


@pytest.mark.parametrize("size", [4, local.TRUSTED_BYTES + 1])
def test_many_ranges_are_read_like_each_or_none(tmp_path, size):
    path = tmp_path / "x"
    path.write_bytes(os.urandom(3 * size))
    file, offsets = OpenFile(str(path)), [size, 0, 1]
    assert file.pread_many([], []) == []
    found = file.pread_many(offsets, [size] * 3)
    assert found == [file.pread(offset, size) for offset in offsets]
    with pytest.raises(TruncatedError, match=f"expected {size} bytes from byte {3 * size - 1}"):
        file.pread_many([0, 3 * size - 1], [size, size])


def test_a_range_is_read_into_memory_of_the_caller(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, at: read(file, [views[0][:7]], at))
    file, buffer = OpenFile(str(tmp_path / "x")), bytearray(30)
    file.pread_into(10, memoryview(buffer))
    assert bytes(buffer) == bytes(range(10, 40))
    with pytest.raises(TruncatedError, match="x: ends at byte 100, expected 30 bytes from byte 80"):
        file.pread_into(80, memoryview(buffer))


def test_files_that_other_libraries_index_are_not_to_be_prepared(tmp_path):
    advice = "restore it, or run `energon prepare` again if the dataset was prepared with it"
    (tmp_path / "shard.00000.mds").write_bytes(b"x" * 10)
    with pytest.raises(TruncatedError, match=advice):
        OpenFile(str(tmp_path / "shard.00000.mds")).pread(0, 20)
    with pytest.raises(DatasetNotFoundError, match=advice):
        OpenFile(str(tmp_path / "shard.00001.mds"))


def test_a_file_is_closed_although_the_interpreter_has_cleared_its_module(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"0123")
    file = OpenFile(str(tmp_path / "x"))
    descriptor = file._descriptor().number
    monkeypatch.setattr(local, "os", None)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
