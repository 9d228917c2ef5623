"""What programs ask a cache pool besides files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from energon.compat.megatron.cache import FileStoreCachePool
from energon.sources.files.open import SystemFileStore
from tests.waiting import wait_until


@pytest.fixture
def store(tmp_path):
    (tmp_path / "files").mkdir()
    for name in "ab":
        (tmp_path / "files" / name).write_bytes(name.encode() * 1000)
    return SystemFileStore(tmp_path / "files")


@pytest.fixture
def pool(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1)
    yield pool
    pool.close()


def test_entries_tell_whether_a_file_was_fetched_and_for_whom(store, pool):
    first, second = pool.get_lazy(store, "a"), pool.get_lazy(store, "a")
    future = first.entry.send_to_cache_future
    assert future.result(timeout=10) is None
    assert future.done()
    assert not future.cancel()
    assert first.entry.refcount == 2
    assert first.entry.data_size in (0, 1000), "in memory until it is on disk"
    assert first.get() == second.get() == b"a" * 1000
    assert second.entry.refcount == 0


def test_pools_tell_their_folder_and_values_their_file(pool, tmp_path):
    assert isinstance(pool.cache_dir, Path)
    assert pool.cache_dir.parent == tmp_path
    lazy = pool.to_cache([1, 2], "numbers")
    wait_until(lambda: lazy.cache_path is not None)
    assert lazy.cache_path.is_file()
    assert pool.cache_dir in lazy.cache_path.parents
    assert lazy.get() == [1, 2]
    # What cannot be written to disk stays in memory, and has no path.
    assert not hasattr(pool.to_cache(object(), "anything"), "cache_path")


def test_workers_get_a_pool_of_the_same_kind(pool):
    other = pickle.loads(pickle.dumps(pool))
    assert type(other) is FileStoreCachePool
    assert other.cache_dir == pool.cache_dir
    other.close()
