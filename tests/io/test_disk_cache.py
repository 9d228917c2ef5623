from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from energon.errors import ConfigError, FormatError, StorageError
from energon.io.backends.local import LocalBackend
from energon.io.disk_cache import BLOCK_BYTES, DiskCache, disk_cache
from energon.io.store import Store
from tests.commands import run_python
from tests.effort import mixed, some
from tests.small_disks import fill, small_disk

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


def used_bytes(cache):
    """The disk space of the contents, whose names have no suffix."""
    files = [path for path in cache.folder.glob("??/*") if not path.suffix]
    return sum(path.stat().st_blocks * 512 for path in files)


def test_the_least_recently_used_entries_make_room(tmp_path, store):
    cache = DiskCache(tmp_path / "cache", max_bytes=10 << 20)
    for number in range(6):
        store.write(str(number), os.urandom(SIZE))
        open_file(cache, store, str(number)).read(0, SIZE)
        open_file(cache, store, "0").read(0, 1)
    assert used_bytes(cache) <= 10 << 20
    before = store.statistics.snapshot()["bytes_read"]
    open_file(cache, store, "0").read(0, SIZE)
    open_file(cache, store, "5").read(0, SIZE)
    assert store.statistics.snapshot()["bytes_read"] == before
    # File systems are imprecise about the time of use: one of these may be the third entry.
    for number in (1, 2, 3):
        open_file(cache, store, str(number)).read(0, SIZE)
    assert store.statistics.snapshot()["bytes_read"] > before


def test_all_writers_keep_the_limit_together(tmp_path, store):
    caches = [DiskCache(tmp_path / "cache", max_bytes=8 << 20) for _ in range(2)]
    for number in range(8):
        store.write(str(number), os.urandom(SIZE))
        open_file(caches[number % 2], store, str(number)).read(0, SIZE)
        assert used_bytes(caches[0]) <= (8 << 20) + BLOCK_BYTES


def test_an_entry_that_is_deleted_while_it_is_open_still_reads(cache, store):
    store.write("x", b"a" * SIZE)
    file = open_file(cache, store, "x")
    file.read(0, 10)
    cache.discard(file.path)
    assert file.read(SIZE - 10, SIZE) == b"a" * 10


@pytest.mark.slow
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
    said = "".join(process.communicate()[0] for process in started)
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


# damaged entries


@pytest.mark.parametrize("damage", ["empty", "cut off", "changed", "checksum lost", "gone"])
def test_what_was_kept_is_made_anew_when_it_is_damaged(cache, damage):
    content = os.urandom(5000)
    path = cache.keep("name", "1", lambda: content)
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut off":
        os.truncate(path, 100)
    elif damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "gone":
        path.unlink()
    else:
        Path(f"{path}.sum").unlink()
    made = []

    def make():
        made.append(1)
        return content

    assert cache.keep("name", "1", make).read_bytes() == content
    assert cache.keep("name", "1", make).read_bytes() == content
    assert made == [1]


def test_a_copy_with_another_date_is_not_made_anew(cache):
    path = cache.keep("name", "1", lambda: b"content")
    os.utime(path, (1, 1))
    for _ in range(2):
        assert cache.keep("name", "1", lambda: pytest.fail("made again")) == path
    cache.discard(path)
    assert not list(path.parent.iterdir())


def test_what_cannot_be_parsed_is_made_once_more(cache):
    def parse(data):
        if bytes(data) != b"good":
            raise FormatError(f"{bytes(data)!r} is not good")
        return "parsed"

    cache.keep("name", "1", lambda: b"bad")
    assert cache.load("name", "1", lambda: b"good", parse) == "parsed"
    assert cache.load("name", "1", lambda: pytest.fail("made again"), parse) == "parsed"
    assert cache.load("empty", "1", lambda: b"", bytes) == b""
    with pytest.raises(FormatError, match="b'worse'"):
        cache.load("other", "1", lambda: b"worse", parse)


def test_what_the_store_refuses_is_no_fault_of_the_disk(cache, caplog):
    def make():
        raise StorageError("no luck")

    with pytest.raises(StorageError, match="no luck"):
        cache.keep("name", "1", make)
    assert not caplog.records


# full disks

PROGRAM = """
import json, logging, resource, sys
from energon.io.disk_cache import DiskCache
from energon.io.backends.local import LocalBackend
from energon.io.store import Store

folder, cached, size, limit, ranges = json.loads(sys.argv[1])
logging.basicConfig(format="%(levelname)s %(message)s")
if limit is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
store = Store(LocalBackend(folder))
store.gives_ranges = ranges
cache = DiskCache(cached, max_bytes=1 << 40)
content = store.read("x")
info = store.info("x")
for _ in range(2):
    file = cache.open(store, "x", version=info.version, size=info.size)
    for start in (5, 2_000_000, 0, size - 10):
        assert file.read(start, min(size, start + 1_500_000)) == content[start : start + 1_500_000]
    for number in range(5):
        kept = cache.keep(f"kept {number}", "1", lambda: content[:700_000])
        kept = kept if isinstance(kept, bytes) else kept.read_bytes()
        assert kept == content[:700_000]
        assert cache.load(f"kept {number}", "1", lambda: content[:700_000], bytes) == kept
print("all there", store.statistics.snapshot()["bytes_read"])
"""


def read_with_a_small_disk(tmp_path, cached, limit, ranges):
    size = 6 << 20
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store/x").write_bytes(os.urandom(size))
    about = json.dumps([str(tmp_path / "store"), str(cached), size, limit, ranges])
    done = run_python(PROGRAM, about)
    assert done.stdout.startswith("all there"), done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "ranges"), some(mixed([0, 10, 600_000, 3 << 20], [True, False]), 2)
)
def test_a_disk_that_takes_nothing_costs_time_only(tmp_path, limit, ranges):
    done = read_with_a_small_disk(tmp_path, tmp_path / "cache", limit, ranges)
    assert done.stderr.count("WARNING") == 1
    assert "takes no copies of remote files (File too large)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("free_kib", "ranges"), some(mixed([0, 8, 100, 2000], [True, False]), 2))
def test_a_full_disk_costs_time_only(tmp_path, ranges, free_kib):
    with small_disk(tmp_path / "disk", 4096) as disk:
        cached = disk / "cache"
        if free_kib:
            cached.mkdir()
        fill(disk, free_kib)
        done = read_with_a_small_disk(tmp_path, cached, None, ranges)
        assert done.stderr.count("WARNING") == 1
        assert "takes no copies of remote files (No space left on device)" in done.stderr


def test_a_disk_with_room_again_is_used_again(tmp_path, store, monkeypatch):
    monkeypatch.setattr("energon.io.disk_cache.BLOCK_RETRY_SECONDS", 0.0)
    store.write("x", os.urandom(SIZE))
    with small_disk(tmp_path / "disk", 8192) as disk:
        cache = DiskCache(disk / "cache", max_bytes=1 << 40)
        file = open_file(cache, store, "x")
        fill(disk, 8)
        content = file.read(0, SIZE)
        (disk / "filler").unlink()
        assert file.read(0, SIZE) == content
        before = store.statistics.snapshot()["bytes_read"]
        assert file.read(0, SIZE) == content
        assert store.statistics.snapshot()["bytes_read"] == before
