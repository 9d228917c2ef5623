from __future__ import annotations

import os
import subprocess
import sys

import pytest

from energon.errors import ConfigError
from energon.io.disk_cache import DiskCache, disk_cache
from energon.io.local_backend import LocalBackend
from energon.io.store import Store

SIZE = 3 << 20


@pytest.fixture
def store(tmp_path):
    return Store(LocalBackend(str(tmp_path / "store")))


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache", max_bytes=1 << 30)


def open_file(cache, store, key):
    info = store.info(key)
    return cache.open(store, key, version=info.version, size=info.size)


def test_objects_of_the_same_name_and_versions_of_one_object_are_kept_apart(cache, store):
    store.write("a/x.tar", b"a" * SIZE)
    store.write("b/x.tar", b"b" * SIZE)
    first = open_file(cache, store, "a/x.tar")
    assert first.read(0, 2) == b"aa"
    assert open_file(cache, store, "b/x.tar").read(0, 2) == b"bb"
    store.write("a/x.tar", b"c" * SIZE)
    assert open_file(cache, store, "a/x.tar").read(0, 2) == b"cc"


def test_a_process_opens_a_file_once(cache, store):
    store.write("x", b"a" * SIZE)
    assert open_file(cache, store, "x") is open_file(cache, store, "x")


def test_the_least_recently_used_entries_make_room(tmp_path, store):
    cache = DiskCache(tmp_path / "cache", max_bytes=10 << 20)
    for number in range(6):
        store.write(str(number), os.urandom(SIZE))
        open_file(cache, store, str(number)).complete()
        open_file(cache, store, "0").read(0, 1)
    cache.trim()
    assert cache.used_bytes() <= 10 << 20
    before = store.statistics.snapshot()["bytes_read"]
    open_file(cache, store, "0").complete()
    open_file(cache, store, "5").complete()
    assert store.statistics.snapshot()["bytes_read"] == before
    open_file(cache, store, "1").complete()
    assert store.statistics.snapshot()["bytes_read"] > before


def test_writing_keeps_the_limit_by_itself(tmp_path, store):
    cache = DiskCache(tmp_path / "cache", max_bytes=8 << 20)
    for number in range(8):
        store.write(str(number), os.urandom(SIZE))
        open_file(cache, store, str(number)).complete()
    assert cache.used_bytes() <= (8 << 20) + 2 * SIZE


def test_an_entry_that_is_deleted_while_it_is_open_still_reads(cache, store):
    store.write("x", b"a" * SIZE)
    file = open_file(cache, store, "x")
    file.read(0, 10)
    cache.discard(file.path)
    assert file.read(SIZE - 10, SIZE) == b"a" * 10


def test_what_is_made_is_made_once_by_all_processes(tmp_path):
    code = f"""
import sys, time
from energon.io.disk_cache import DiskCache
def make():
    time.sleep(0.1)
    print("made")
    return b"content"
path = DiskCache({str(tmp_path / "cache")!r}, max_bytes=1 << 30).keep("name", "1", make)
assert path.read_bytes() == b"content"
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = "".join(process.communicate(timeout=60)[0] for process in started)
    assert [process.returncode for process in started] == [0] * 4
    assert said == "made\n"


def test_what_was_discarded_is_made_anew(cache):
    path = cache.keep("name", "1", lambda: b"old")
    assert cache.keep("name", "1", lambda: b"new") == path
    cache.discard(path)
    assert cache.keep("name", "1", lambda: b"new").read_bytes() == b"new"
    assert cache.keep("name", "2", lambda: b"other").read_bytes() == b"other"


def test_a_folder_that_cannot_be_made_says_which_variable_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ENERGON_STORAGE_CACHE_DIR"):
        DiskCache(tmp_path / "file" / "cache", max_bytes=1)


def test_the_environment_says_where_and_how_much(tmp_path, monkeypatch):
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "here"))
    monkeypatch.setenv("ENERGON_STORAGE_CACHE_BYTES", "5MB")
    assert disk_cache().folder == tmp_path / "here"
    assert disk_cache().max_bytes == 5_000_000
    assert disk_cache() is disk_cache()
