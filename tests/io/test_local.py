from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from energon.errors import DatasetNotFoundError, TruncatedError
from energon.io.backends import local
from energon.io.backends.local import FilePool, OpenFile


def test_reads_exact_ranges_with_few_open_files_in_many_threads(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 1000)
    pool = FilePool(max_open=3)
    before = len(os.listdir("/proc/self/fd"))

    def read(number):
        return pool.pread(str(tmp_path / str(number % 20)), 10, 100)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(400)))
    assert found == [bytes([number % 20]) * 100 for number in range(400)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_short_file_says_where_it_ends(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(b"12345")
    with pytest.raises(
        TruncatedError, match=r"x\.tar: ends at byte 5, expected 10 bytes from byte 2"
    ):
        FilePool().pread(str(path), 2, 10)


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


def test_a_missing_file_says_what_to_do(tmp_path):
    for read in (lambda pool, path: pool.pread(path, 0, 1), lambda pool, path: pool.size(path)):
        with pytest.raises(DatasetNotFoundError, match="no such file.*energon prepare"):
            read(FilePool(), str(tmp_path / "x.tar"))


def test_files_that_other_libraries_index_are_not_to_be_prepared(tmp_path):
    advice = "restore it, or run `energon prepare` again if the dataset was prepared with it"
    (tmp_path / "shard.00000.mds").write_bytes(b"x" * 10)
    with pytest.raises(TruncatedError, match=advice):
        OpenFile(str(tmp_path / "shard.00000.mds")).pread(0, 20)
    with pytest.raises(DatasetNotFoundError, match=advice):
        OpenFile(str(tmp_path / "shard.00001.mds"))


def test_a_forked_child_opens_files_of_its_own(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"parent")
    pool = FilePool()
    pool.pread(str(path), 0, 6)
    pool._pid += 1  # as seen in a child
    assert pool.pread(str(path), 0, 6) == b"parent"
    assert pool._pid == os.getpid()


def test_a_file_is_closed_although_the_interpreter_has_cleared_its_module(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"0123")
    file = OpenFile(str(tmp_path / "x"))
    descriptor = file.descriptor
    monkeypatch.setattr(local, "os", None)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
