import os
import resource

import numpy as np
import pytest

from energon.loader.transport.slots import (
    SharedMemory,
    create_shared,
    map_shared,
    read_shared,
    share_bytes,
)


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


@pytest.mark.parametrize("has_page_map", [True, False])
def test_a_view_shows_what_the_worker_wrote_and_keeps_its_own_changes_until_it_is_dropped(
    tmp_path, monkeypatch, has_page_map
):
    if not has_page_map:
        monkeypatch.setattr("energon.loader.transport.slots.PAGE_MAP", tmp_path / "none")
    size = 20_001
    descriptor = create_shared(size)
    slot = np.frombuffer(map_shared(os.dup(descriptor)), np.uint8)
    one, other = SharedMemory(os.dup(descriptor)), SharedMemory(descriptor)
    addresses = set()
    for number, changed in enumerate([(0, 0), (0, 1), (4095, 8193), (20_000, size), (0, size)]):
        slot[:] = number
        view = one.view()
        addresses.add(view.ctypes.data)
        view[slice(*changed)] = 99
        assert one.view() is view
        assert (view == 99).sum() == changed[1] - changed[0]
        assert (other.view() == number).all()
        del view
        assert (one.view() == number).all()
    if has_page_map and os.path.exists("/proc/self/pagemap"):
        assert len(addresses) == 1, "pages were mapped again"
