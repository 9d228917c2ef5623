from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from energon.cache import contents
from energon.cache.contents import FOLDER_PREFIX
from energon.cache.file_pool import FileStoreCachePool, Step
from energon.cache.pool import DirectLazy, MockLazy, NoCachePool
from energon.decode.sample_decoder import SampleDecoder
from energon.errors import ConfigError, NoSuchFileError
from energon.samples.crude import CrudeSample
from energon.sources.files.open import SystemFileStore
from energon.sources.files.store import DecodeFileStore, PrimaryFileStore
from tests.cache.stores import CountingStore
from tests.effort import mixed
from tests.small_disks import fill, small_disk
from tests.waiting import wait_until

GIB = 1 << 30


FILE_BYTES = 160
"""Maximum size of a file of a `CountingStore`, with its header."""


def folders(parent: Path) -> list[Path]:
    return list(parent.glob(f"{FOLDER_PREFIX}*"))


def is_prefetched(pool, count):
    # `usage` counts a file as soon as its room is reserved, before it can be read.
    folder = Path(pool.parent_cache_dir)
    wait_until(lambda: len(list(folder.glob(f"{FOLDER_PREFIX}*/??/*"))) == count)


@pytest.fixture
def pool(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2)
    yield pool
    pool.close()


@pytest.fixture(params=["raw", "decoded", "none"])
def any_pool(request, tmp_path):
    if request.param == "none":
        yield NoCachePool()
        return
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=2, method=request.param)
    yield pool
    pool.close()


def test_lazies_give_what_their_store_has(any_pool):
    store = CountingStore()
    lazies = [any_pool.get_lazy(store, str(n % 7)) for n in range(50)]
    for n, lazy in enumerate(lazies):
        assert lazy.get() == lazy.get() == store.content(str(n % 7))
    assert any_pool.get(store, "5") == any_pool.get(store, "5") == store.content("5")


def test_sources_are_noted_from_store_and_cache_alike(any_pool):
    store = CountingStore()
    first, second = CrudeSample(), CrudeSample()
    any_pool.get_lazy(store, "5").get(first)
    any_pool.get(store, "5", second)
    assert first["__sources__"] == second["__sources__"] == (store["5"][1],)


def test_a_missing_file_fails_where_it_is_read(any_pool):
    lazy = any_pool.get_lazy(CountingStore(), "absent")
    with pytest.raises(NoSuchFileError, match="'absent' is not there"):
        lazy.get()
    with pytest.raises(NoSuchFileError):
        lazy.get()
    with pytest.raises(NoSuchFileError):
        any_pool.get(CountingStore(), "absent")


@pytest.mark.parametrize("name", [".txt", "a/0.txt"])
def test_parts_of_the_own_sample_are_told_apart(any_pool, tmp_path, name):
    for n in range(3):
        path = tmp_path / "files" / "a" / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {n}")
    store = DecodeFileStore(SystemFileStore(tmp_path / "files"), decoder=SampleDecoder())
    lazies = [any_pool.get_lazy(PrimaryFileStore(store, f"a/{n}"), name) for n in range(3)]
    expected = ["text 0", "text 1", "text 2"] if name == ".txt" else ["text 0"] * 3
    assert [lazy.get() for lazy in lazies] == expected
    assert any_pool.get(PrimaryFileStore(store, "a/2"), ".txt") == "text 2"


def test_values_are_decoded_alike_in_any_form(any_pool, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6).reshape(2, 3))
    store = DecodeFileStore(SystemFileStore(tmp_path), decoder=SampleDecoder())
    value = any_pool.get_lazy(store, "x.npy").get()
    assert value.tolist() == [[0, 1, 2], [3, 4, 5]]
    value[:] = 7  # what one user does to a value is nothing to the next
    assert any_pool.get_lazy(store, "x.npy").get().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_values_that_are_put_away_come_back(any_pool):
    value = {"pixels": np.arange(12, dtype=np.uint8).reshape(3, 4), "names": ["a", ("b", None)]}
    lazy = any_pool.to_cache(value, "mine")
    for _ in range(2):
        found = lazy.get()
        assert found["names"] == value["names"]
        assert np.array_equal(found["pixels"], value["pixels"])
    again = pickle.loads(pickle.dumps(lazy))
    assert again.get()["names"] == value["names"]


def test_values_that_are_no_plain_data_stay_in_memory(any_pool):
    value = object()
    assert any_pool.to_cache(value, "mine").get() is value


def test_lazies_of_the_same_file_are_equal(any_pool):
    store, other = CountingStore(), CountingStore(path="/other")
    lazy = any_pool.get_lazy(store, "1")
    assert lazy == any_pool.get_lazy(CountingStore(), "1")
    assert hash(lazy) == hash(any_pool.get_lazy(store, "1"))
    assert lazy != any_pool.get_lazy(store, "2")
    assert lazy != any_pool.get_lazy(other, "1")
    assert lazy != "1"


def test_a_lazy_that_was_sent_elsewhere_reads_from_its_store(any_pool):
    lazy = pickle.loads(pickle.dumps(any_pool.get_lazy(CountingStore(), "4")))
    assert isinstance(lazy, DirectLazy)
    assert lazy.get() == CountingStore().content("4")


def test_a_mock_calls_its_function():
    lazy = MockLazy("x", str.upper)
    assert lazy.get() == "X"
    assert lazy == MockLazy("x", str.lower)


def test_files_are_fetched_before_they_are_wanted(pool):
    store = CountingStore()
    lazies = [pool.get_lazy(store, str(n)) for n in range(20)]
    is_prefetched(pool, 20)
    reads = len(store.reads)
    assert [lazy.get() for lazy in lazies] == [store.content(str(n)) for n in range(20)]
    assert len(store.reads) == reads == 20
    assert pool.stats() == {"hits": 20, "misses": 0}


def test_a_file_is_fetched_once_for_all_who_want_it(pool):
    store = CountingStore()
    lazies = [pool.get_lazy(store, "1") for _ in range(10)]
    is_prefetched(pool, 1)
    assert {lazy.get() for lazy in lazies} == {store.content("1")}
    assert pool.get_lazy(store, "1").get() == store.content("1")
    assert store.reads == ["1"]


def test_nobody_waits_for_files_that_are_not_being_fetched(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1)
    slow, fast = CountingStore(path="/slow"), CountingStore(path="/fast")
    slow.gate.clear()
    blocked = pool.get_lazy(slow, "1")
    assert pool.get_lazy(fast, "2").get() == fast.content("2")
    slow.gate.set()
    assert blocked.get() == slow.content("1")
    pool.close()


def test_limits_hold_and_what_was_used_longest_ago_goes_first(tmp_path):
    pool = FileStoreCachePool(
        parent_cache_dir=tmp_path, num_workers=1, max_cache_size_gbytes=10 * FILE_BYTES / GIB
    )
    store = CountingStore(100)
    for n in range(30):
        assert pool.get(store, str(100 + n)) == store.content(str(100 + n))
        assert pool.usage()[0] <= 10 * FILE_BYTES
    store.reads.clear()
    for n in range(20, 30):
        pool.get(store, str(100 + n))
    assert store.reads == []
    pool.get(store, "120")
    pool.get(store, "200")  # has no room but that of 121
    pool.get(store, "120")
    assert store.reads == ["200"]
    pool.get(store, "121")
    assert store.reads == ["200", "121"]
    pool.close()


def test_the_number_of_files_is_limited(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=3, max_cache_count=4)
    store = CountingStore()
    lazies = [pool.get_lazy(store, str(n)) for n in range(50)]
    is_prefetched(pool, 4)
    for n, lazy in enumerate(lazies):
        assert lazy.get() == store.content(str(n))
        assert pool.usage()[1] <= 4
    pool.close()


def test_a_full_cache_waits_and_drops_no_pinned_file(tmp_path):
    pool = FileStoreCachePool(
        parent_cache_dir=tmp_path, num_workers=2, max_cache_size_gbytes=5 * FILE_BYTES / GIB
    )
    store = CountingStore(100)
    lazies = [pool.get_lazy(store, str(n)) for n in range(20)]
    is_prefetched(pool, 5)
    wait_until(lambda: len(store.reads) == 7)
    time.sleep(0.1)
    assert pool.usage()[1] == 5
    assert set(store.reads) == {str(n) for n in range(7)}
    assert [lazy.get() for lazy in lazies] == [store.content(str(n)) for n in range(20)]
    # Five were on disk, two in memory, and those after them in turn; none was read twice.
    assert len(store.reads) == 20
    pool.close()


def test_room_that_nobody_wants_is_given_to_the_next(tmp_path):
    pool = FileStoreCachePool(
        parent_cache_dir=tmp_path, num_workers=2, max_cache_size_gbytes=5 * FILE_BYTES / GIB
    )
    store = CountingStore(100)
    forgotten = [pool.get_lazy(store, str(n)) for n in range(5)]
    is_prefetched(pool, 5)
    del forgotten
    gc.collect()
    lazies = [pool.get_lazy(store, str(10 + n)) for n in range(5)]
    wait_until(lambda: all(str(10 + n) in store.reads for n in range(5)))
    wait_until(lambda: pool.usage()[1] == 5)
    store.reads.clear()
    assert [lazy.get() for lazy in lazies] == [store.content(str(10 + n)) for n in range(5)]
    pool.close()


def test_files_larger_than_the_cache_come_from_their_store(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, max_cache_size_gbytes=10 / GIB)
    store = CountingStore(100)
    assert pool.get_lazy(store, "1").get() == store.content("1")
    assert pool.usage() == (0, 0)
    pool.close()


def test_values_that_are_put_away_leave_with_their_lazies(pool):
    lazies = [pool.to_cache(np.zeros(1000), str(n)) for n in range(10)]
    wait_until(lambda: pool.usage()[1] == 10)
    assert lazies[3].get().shape == (1000,)
    del lazies
    gc.collect()
    pool.get_lazy(CountingStore(), "1").get()
    wait_until(lambda: pool.usage()[1] <= 1)


def test_many_threads_get_what_they_ask_for(tmp_path):
    pool = FileStoreCachePool(
        parent_cache_dir=tmp_path, num_workers=3, max_cache_size_gbytes=20 * FILE_BYTES / GIB
    )
    store = CountingStore(100)

    def work(seed):
        lazies = [pool.get_lazy(store, str((seed * 7 + n) % 40)) for n in range(30)]
        return all(lazy.get() == store.content(lazy.fname) for lazy in reversed(lazies))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(12)))
    assert pool.usage()[0] <= 20 * FILE_BYTES
    pool.close()


def test_a_pool_that_was_closed_opens_again(pool, tmp_path):
    store = CountingStore()
    lazy = pool.get_lazy(store, "1")
    is_prefetched(pool, 1)
    pool.close()
    assert folders(tmp_path) == []
    assert lazy.get() == store.content("1")
    assert pool.get_lazy(store, "2").get() == store.content("2")


def test_a_folder_that_somebody_deletes_costs_time_only(pool, tmp_path):
    store = CountingStore()
    lazies = [pool.get_lazy(store, str(n)) for n in range(10)]
    is_prefetched(pool, 10)
    (folder,) = folders(tmp_path)
    for path in folder.glob("??/*"):
        path.unlink()
    for path in folder.glob("users/*/*"):
        path.unlink()
    assert [lazy.get() for lazy in lazies] == [store.content(str(n)) for n in range(10)]


def test_nothing_is_left_when_the_pool_is_forgotten(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    pool.get_lazy(CountingStore(), "1").get()
    assert len(folders(tmp_path)) == 1
    del pool
    gc.collect()
    assert folders(tmp_path) == []


def test_a_thread_of_a_pool_may_collect_it(tmp_path):
    class CollectingStore(CountingStore):
        def get_raw(self, name):
            pools.clear()
            return super().get_raw(name)

    pools = [FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1)]
    prefetcher = pools[0]._open()
    ticket = prefetcher.ask(CollectingStore(), "1")
    wait_until(lambda: not prefetcher._threads[0].is_alive())
    assert not pools
    assert ticket.take()[0] == CountingStore().content("1")


def test_others_cannot_look_into_the_cache(pool, tmp_path):
    pool.get_lazy(CountingStore(), "1").get()
    (folder,) = folders(tmp_path)
    assert folder.stat().st_mode & 0o077 == 0


_USER = """
import sys, time
from energon.cache.file_pool import FileStoreCachePool
from tests.cache.stores import CountingStore
pool = FileStoreCachePool(parent_cache_dir=sys.argv[1], num_workers=2, name="together")
store = CountingStore()
lazies = [pool.get_lazy(store, str(n)) for n in range(int(sys.argv[2]), int(sys.argv[3]))]
while pool.usage()[1] < int(sys.argv[4]):
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.readline()
print([lazy.get() for lazy in lazies] == [store.content(lazy.fname) for lazy in lazies],
      len(store.reads), flush=True)
"""


def start_user(parent, start, stop, total):
    process = subprocess.Popen(
        [sys.executable, "-c", _USER, str(parent), str(start), str(stop), str(total)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process):
    out, _ = process.communicate("go\n")
    assert process.returncode == 0
    return out.split()


def test_processes_share_what_they_fetch(tmp_path):
    first = start_user(tmp_path, 0, 20, 20)
    second = start_user(tmp_path, 10, 30, 30)
    assert len(folders(tmp_path)) == 1
    assert finish(second) == ["True", "10"]
    assert finish(first) == ["True", "20"]
    wait_until(lambda: folders(tmp_path) == [])


def test_nothing_is_left_after_all_users_were_killed(tmp_path):
    users = [start_user(tmp_path, 0, 5, 5), start_user(tmp_path, 0, 5, 5)]
    assert len(folders(tmp_path)) == 1
    for user in users:
        user.kill()
        user.communicate()
    assert len(folders(tmp_path)) == 1
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    pool.usage()
    (folder,) = folders(tmp_path)
    assert folder.name.endswith(pool.name)
    pool.close()


def test_what_a_killed_process_held_is_free_again(tmp_path):
    killed = start_user(tmp_path, 0, 5, 5)
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, name="together", max_cache_count=5)
    assert pool.usage()[1] == 5
    killed.kill()
    killed.communicate()
    store = CountingStore()
    lazies = [pool.get_lazy(store, str(n)) for n in range(10, 15)]
    wait_until(lambda: set(store.reads) == {str(n) for n in range(10, 15)})
    wait_until(lambda: all(pool.get(store, lazy.fname) and True for lazy in lazies))
    assert pool.usage()[1] == 5
    pool.close()


def test_a_folder_left_by_a_crash_of_the_machine_goes_with_the_next_use(tmp_path):
    left = tmp_path / f"{FOLDER_PREFIX}{os.getuid()}-left"
    (left / "ab").mkdir(parents=True)
    (left / "ab" / "abcd").write_bytes(bytes(1000))
    (left / "lock").touch()
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    pool.get(CountingStore(), "1")
    assert not left.exists()
    pool.close()


def test_a_forked_process_makes_threads_of_its_own(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, num_workers=1)
    store = CountingStore()
    inherited = pool.get_lazy(store, "1")
    is_prefetched(pool, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        ok = pool.get_lazy(store, "2").get() == store.content("2")
        ok = ok and inherited.get() == store.content("1")
        pool.close()
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert inherited.get() == store.content("1")
    assert pool.stats()["hits"] == 1
    pool.close()
    wait_until(lambda: folders(tmp_path) == [])


@pytest.mark.parametrize("free_kib", [0, 4, 12, 40, 80, 200])
def test_a_disk_that_is_full_from_the_beginning_is_nothing_but_slower(tmp_path, caplog, free_kib):
    with small_disk(tmp_path / "disk", 1024) as disk:
        fill(disk, free_kib)
        pool = FileStoreCachePool(parent_cache_dir=disk, num_workers=2)
        store = CountingStore(100_000)
        lazies = [pool.get_lazy(store, str(n)) for n in range(5)]
        values = [pool.to_cache({"n": n, "data": bytes(10_000)}, "value") for n in range(5)]
        for n in range(5):
            assert lazies[n].get() == pool.get(store, str(n)) == store.content(str(n))
            assert values[n].get() == {"n": n, "data": bytes(10_000)}
        # What a thread is writing may still find room.
        (disk / "filler").unlink()
        wait_until(lambda: pool.usage()[1] == len(list(disk.glob(f"{FOLDER_PREFIX}*/??/*"))))
        pool.close()
        assert len(caplog.records) == 1
        assert "read from their stores instead" in caplog.text
        assert "max_cache_size_gbytes" in caplog.text


def test_a_disk_with_room_again_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "CACHE_RETRY_SECONDS", 0.0)
    with small_disk(tmp_path / "disk", 1024) as disk:
        fill(disk, 0)
        pool = FileStoreCachePool(parent_cache_dir=disk)
        store = CountingStore(1000)
        assert pool.get(store, "1") == store.content("1")
        (disk / "filler").unlink()
        for _ in range(3):
            assert pool.get(store, "1") == store.content("1")
        assert store.reads == ["1", "1"]
        pool.close()


@pytest.mark.parametrize(
    ("method", "damage"), mixed(["raw", "decoded"], ["empty", "cut off", "changed", "huge"])
)
def test_damaged_files_of_a_cache_are_fetched_again(tmp_path, damage, method):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path, method=method)
    store = CountingStore()
    assert pool.get(store, "1") == store.content("1")
    lazy = pool.get_lazy(store, "1")
    wait_until(lambda: lazy._ticket.task.step is Step.KEPT)
    (folder,) = folders(tmp_path)
    (path,) = folder.glob("??/*")
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut off": data[:-1],
            "changed": data[:-1] + b"?",
            "huge": data[:8] + b"\xff" * 7 + data[15:],
        }[damage]
    )
    assert lazy.get() == store.content("1")
    assert pool.get(store, "1") == store.content("1")
    assert pool.get(store, "1") == store.content("1")
    assert 2 <= len(store.reads) <= 3
    pool.close()


def test_a_value_that_somebody_has_deleted_is_a_failure_of_its_sample(tmp_path):
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    lazy = pool.to_cache([1], "value")
    wait_until(lambda: lazy._ticket.task.step is Step.KEPT)
    (folder,) = folders(tmp_path)
    for path in folder.glob("users/*/value-*"):
        path.unlink()
    with pytest.raises(NoSuchFileError, match="stored in this cache"):
        lazy.get()
    pool.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 0},
        {"max_cache_size_gbytes": 0},
        {"max_cache_count": -1},
        {"method": "zip"},
        {"name": "../else"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FileStoreCachePool(**settings)


def test_pools_can_be_sent_to_workers(tmp_path):
    for name in (None, "mine"):
        pool = FileStoreCachePool(parent_cache_dir=tmp_path, max_cache_count=7, name=name)
        again = pickle.loads(pickle.dumps(pool))
        assert again.name == pool.name
        assert again.limits == pool.limits
        pool.close()


def test_a_parent_that_takes_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    pool = FileStoreCachePool(parent_cache_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="parent_cache_dir"):
        pool.get_lazy(CountingStore(), "1")
