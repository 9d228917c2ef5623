import os
import resource

import pytest

from energon.loader.transport.slots import create_shared, map_shared, read_shared, share_bytes


def test_bytes_come_back():
    for data in (b"", b"x", b"abc" * 100_000):
        assert read_shared(share_bytes(data)) == data


def test_two_maps_show_the_same_memory():
    descriptor = create_shared(5000)
    first, second = map_shared(os.dup(descriptor)), map_shared(descriptor)
    first[4999] = 7
    assert second[4999] == 7
    assert len(second) == 5000


def test_works_where_memory_cannot_be_anonymous(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    descriptor = share_bytes(b"abc")
    assert os.listdir(tmp_path) == []
    assert read_shared(descriptor) == b"abc"


def test_a_limit_of_the_size_of_files_is_named():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r"may not create 5000 bytes of .*raise `ulimit -f`"):
            create_shared(5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
