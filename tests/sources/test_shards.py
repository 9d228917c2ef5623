from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from energon import WorkerConfig, get_loader, get_train_dataset
from energon.errors import ShardChangedError
from energon.sources.shards import ShardPool
from tests.datasets import make_crude, write_shard


@pytest.fixture
def root(tmp_path):
    return make_crude(tmp_path / "ds", [2] * 8)


def open_shard(pool, root, number):
    return pool.open(str(root / f"00{number}.tar"), num_samples=2, dataset=root)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_shard_that_is_open_is_not_opened_again(root):
    pool = ShardPool()
    first = open_shard(pool, root, 0)
    assert open_shard(pool, root, 0) is first
    assert first.table.num_samples == 2
    assert first.file.pread(0, 3) == b"s0."


def test_the_least_recently_used_shard_is_closed(root):
    before = descriptors()
    pool = ShardPool(max_open=3)
    kept = open_shard(pool, root, 0)
    for number in range(1, 8):
        open_shard(pool, root, number)
        assert open_shard(pool, root, 0) is kept
    assert descriptors() <= before + 2 * 3


def test_a_shard_that_is_held_can_be_read_although_the_pool_has_closed_it(root):
    pool = ShardPool(max_open=1)
    held = open_shard(pool, root, 0)
    open_shard(pool, root, 1)
    assert held.file.pread(0, 3) == b"s0."
    assert open_shard(pool, root, 0) is not held


def test_many_threads_share_a_pool(root):
    pool = ShardPool(max_open=2)

    def read(number):
        return open_shard(pool, root, number % 8).file.pread(0, 4)

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(read, range(400)))
    assert found == [f"s{2 * (number % 8)}.txt".encode()[:4] for number in range(400)]


def test_a_copy_that_was_pickled_begins_empty_and_stays_shared(root):
    pool = ShardPool(max_open=5)
    open_shard(pool, root, 0)
    before = descriptors()
    first, second = pickle.loads(pickle.dumps((pool, pool)))
    assert first is second
    assert first.max_open == 5
    assert descriptors() == before
    assert open_shard(first, root, 0).table.num_samples == 2


def test_a_file_that_is_replaced_while_the_pool_has_closed_it_is_not_read_by_the_old_table(root):
    pool = ShardPool(max_open=1)
    open_shard(pool, root, 0)
    open_shard(pool, root, 1)
    write_shard(root / "new.tar", [("x", {"txt": b""}), ("y", {"txt": b"1" * 600})])
    os.replace(root / "new.tar", root / "000.tar")
    with pytest.raises(ShardChangedError, match=r"000\.tar: was changed at"):
        open_shard(pool, root, 0)
    with pytest.raises(ShardChangedError, match=r"000\.tar: sample 's0' is no longer at byte 0"):
        open_shard(ShardPool(), root, 0)


def test_only_a_file_of_another_date_is_compared_with_its_table_and_only_once(root):
    path = root / "000.tar"
    about = os.stat(path)
    pool = ShardPool(max_open=1)
    os.utime(path, ns=(0, 7))
    open_shard(pool, root, 0)
    # What changes from here on has the date of a file that was found to be right.
    content = bytearray(path.read_bytes())
    content[0] = ord("x")
    path.write_bytes(content)
    os.utime(path, ns=(0, 7))
    open_shard(pool, root, 1)
    open_shard(pool, root, 0)
    os.utime(path, ns=(0, about.st_mtime_ns))
    open_shard(ShardPool(), root, 0)
    os.utime(path, ns=(0, 8))
    with pytest.raises(ShardChangedError, match="'s0'"):
        open_shard(ShardPool(), root, 0)


def test_more_samples_than_were_indexed_are_a_change(root):
    with pytest.raises(ShardChangedError, match=r"has 2 samples in .* bytes, had 3 samples when"):
        ShardPool().open(str(root / "000.tar"), num_samples=3, dataset=root)


def rewrite(path, old, new):
    with open(path, "r+b") as file:
        content = file.read()
        assert old in content
        file.seek(0)
        file.write(content.replace(old, new))
    # The clock of a file system may be coarser than this test is fast.
    now = os.stat(path).st_mtime_ns + 1_000_000
    os.utime(path, ns=(now, now))


@pytest.mark.parametrize("closes", [False, True])
def test_a_shard_that_is_rewritten_in_place_while_it_is_read_is_a_change(root, closes):
    pool = ShardPool()
    open_shard(pool, root, 0)
    rewrite(root / "000.tar", b"text 1", b"TEXT 1")
    if closes:
        pool.close(str(root / "000.tar"))
    for _ in range(2):
        with pytest.raises(
            ShardChangedError, match="000.tar: was changed at .* after this run had"
        ):
            open_shard(pool, root, 0)
    open_shard(pool, root, 1)


def test_a_run_ends_before_it_delivers_new_contents_under_old_keys(tmp_path):
    root = make_crude(tmp_path / "ds", [50])
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
    dataset = get_train_dataset(
        root, worker_config=config, batch_size=None, max_samples_per_sequence=5
    )
    batches = iter(get_loader(dataset))
    delivered = [(sample["__key__"], sample["txt"]) for sample in islice(batches, 4)]
    rewrite(root / "000.tar", b"text", b"TEXT")
    with pytest.raises(ShardChangedError, match="resume from a saved state"):
        delivered += [(sample["__key__"], sample["txt"]) for sample in islice(batches, 200)]
    assert all(text == f"text {key[1:]}" for key, text in delivered)
