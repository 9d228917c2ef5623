from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import StorageError
from energon.io.backends.local import OpenFile
from energon.sources.files.locate import FileRange
from energon.sources.files.samples import read_file_ranges

CONTENT = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for number in range(3):
        (folder / f"{number}.tar").write_bytes(bytes([number]) + CONTENT)
    return [OpenFile(str(folder / f"{number}.tar")) for number in range(3)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, len(CONTENT)), st.integers(0, 300)), max_size=30
    )
)
def test_each_content_comes_in_its_place(files, chosen):
    chosen = [(n, at, min(size, len(CONTENT) + 1 - at)) for n, at, size in chosen]
    ranges = [FileRange(f"{n}.tar", files[n], at, size) for n, at, size in chosen]
    expected = [(bytes([n]) + CONTENT)[at : at + size] for n, at, size in chosen]
    assert read_file_ranges(ranges) == expected


class Distant:
    """A file whose answer comes when all have been asked."""

    is_remote = True
    path = "distant"

    def __init__(self, all_asked):
        self.all_asked = all_asked

    def pread(self, offset, size):
        self.all_asked.wait(100)
        return bytes(size)


def test_distant_shards_are_asked_in_parallel():
    all_asked = threading.Barrier(5)
    ranges = [FileRange(f"{n}.tar", Distant(all_asked), 0, n) for n in range(5)]
    assert read_file_ranges(ranges) == [bytes(n) for n in range(5)]


class Broken(Distant):
    def pread(self, offset, size):
        raise StorageError("the store is out of reach")


def test_a_shard_that_cannot_be_read_is_an_error():
    ready = threading.Barrier(1)
    ranges = [FileRange("0.tar", Distant(ready), 0, 1), FileRange("1.tar", Broken(ready), 0, 1)]
    with pytest.raises(StorageError, match="out of reach"):
        read_file_ranges(ranges)
