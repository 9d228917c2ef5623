"""All sources of a process keep decoded blocks within one budget."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from concurrent.futures import Future
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon import WorkerConfig, get_loader, get_train_dataset
from energon.io.backends.base import NotNeededError, request_is_needed
from energon.io.threads import WaitingThreads
from energon.sources import decoded_blocks
from energon.sources.decoded_blocks import (
    BUDGET_BYTES,
    MAX_SOURCE_BYTES,
    DecodedBlocks,
    SliceCost,
    open_slices,
)
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What this process keeps, with nothing of other tests in it."""
    fresh = decoded_blocks._Kept()
    monkeypatch.setattr(decoded_blocks, "_kept", fresh)
    return fresh


def at_once(function, *arguments):
    """Run a function as another thread would."""
    future = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "get", "drop", "begin", "end"]),
            st.integers(0, 3),
            st.integers(0, 9),
            st.integers(1, BUDGET_BYTES // 2),
        ),
        max_size=80,
    )
)
def test_what_was_used_longest_ago_makes_room(steps):
    kept = decoded_blocks._kept = decoded_blocks._Kept()
    sources = [DecodedBlocks() for _ in range(4)]
    latest = {}
    for what, source, key, size in steps:
        blocks = sources[source]
        if what == "keep":
            blocks.keep(key, (key, size), size)
            latest[source, key] = (key, size)
            assert blocks.get(key) == (key, size)
        elif what == "get":
            assert blocks.get(key) in (None, latest.get((source, key)))
        elif what == "drop":
            blocks.drop(key)
            assert blocks.get(key) is None
        elif what == "begin":
            known = latest.get((source, key)) if key in blocks._blocks else (key, "made")
            blocks.begin([key], lambda key: (key, "made"), at_once, most=size % 2)
            assert blocks.get(key) == (known if size % 2 or known[1] != "made" else None)
        else:
            sources[source] = DecodedBlocks()
            latest = {place: block for place, block in latest.items() if place[0] != source}
            del blocks
            gc.collect(0)
        with kept.lock:
            kept.make_room()
        sizes = [[size for _, size in each._blocks.values()] for each in sources]
        assert kept.num_bytes == sum(map(sum, sizes)) == sum(kept.sizes.values())
        assert kept.num_bytes <= BUDGET_BYTES or all(len(each) <= 2 for each in sizes)


def test_blocks_are_begun_once_in_their_order_and_discarded_if_nobody_reads_them():
    blocks, begun = DecodedBlocks(), []

    def submit(make, key):
        begun.append(key)
        return at_once(make, key)

    blocks.keep(2, "kept", 1)
    blocks.begin([3, 2, 1, 0], str, submit, most=2)
    assert begun == [3, 1]  # what is kept does not count
    blocks.begin([1, 0], str, submit, most=2)
    assert begun == [3, 1, 0]
    assert [blocks.get(key) for key in (3, 2, 1, 0)] == [None, "kept", "1", "0"]
    assert blocks.get(1) is None  # it belongs to the reader now, who may keep it


def test_a_thread_may_collect_a_source_while_another_one_begins_blocks():
    blocks, garbage = DecodedBlocks(), [DecodedBlocks()]

    def submit(make, key):
        thread = threading.Thread(target=garbage.clear, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return at_once(make, key)

    blocks.begin([0], str, submit, most=1)
    assert blocks.get(0) == "0"


def test_a_failure_to_make_a_block_is_raised_when_it_is_read():
    blocks = DecodedBlocks()
    blocks.begin([0], lambda key: 1 // key, at_once, most=1)
    with pytest.raises(ZeroDivisionError):
        blocks.get(0)
    assert blocks.get(0) is None


def test_at_exit_the_block_that_is_made_is_waited_for_and_no_other_is_begun():
    blocks, threads, steps = DecodedBlocks(), WaitingThreads(1, "maker"), []
    running, may_go_on = threading.Event(), threading.Event()

    def make(key):
        running.set()
        may_go_on.wait()
        steps.append(f"made {key}")
        return key

    blocks.begin([0, 1], make, threads.submit, most=2)
    running.wait()
    ending = threading.Thread(target=lambda: (decoded_blocks._end_all(), steps.append("ended")))
    ending.start()
    wait_until(blocks._coming[1].cancelled)
    may_go_on.set()
    ending.join()
    assert steps == ["made 0", "ended"]


def test_at_exit_nobody_needs_the_requests_for_the_block_that_is_made():
    blocks, threads, answers = DecodedBlocks(), WaitingThreads(1, "maker"), []
    running = threading.Event()

    def make(key):
        is_needed = request_is_needed()
        answers.append(is_needed())
        running.set()
        wait_until(lambda: not is_needed())
        answers.append(is_needed())
        raise NotNeededError

    blocks.begin([0], make, threads.submit, most=1)
    running.wait()
    decoded_blocks._end_all()
    assert answers == [True, False]


def test_at_exit_a_request_without_an_answer_is_abandoned(monkeypatch):
    monkeypatch.setattr(decoded_blocks, "MAX_EXIT_SECONDS", 0.01)
    blocks, threads, answer = DecodedBlocks(), WaitingThreads(1, "maker"), threading.Event()
    blocks.begin([0], lambda key: answer.wait(), threads.submit, most=1)
    wait_until(blocks._coming[0].running)
    decoded_blocks._end_all()
    assert blocks._coming[0].running()
    answer.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    blocks = DecodedBlocks()
    blocks.begin([0], str, lambda *_: Future(), most=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if blocks.get(0) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_least_recently_used_goes_first_wherever_it_is(kept):
    first, second = DecodedBlocks(), DecodedBlocks()
    for key in range(4):
        first.keep(key, key, BUDGET_BYTES // 8)
        second.keep(key, key, BUDGET_BYTES // 8)
    assert first.get(0) == 0
    second.keep("new", "new", BUDGET_BYTES // 4)
    assert (second.get(0), first.get(1)) == (None, None)
    assert (first.get(0), second.get(1), second.get("new")) == (0, 1, "new")


@given(st.lists(st.integers(1, 4 * BUDGET_BYTES), max_size=200))
def test_slices_that_are_open_fit_into_the_budget(sizes):
    numbers = open_slices([SliceCost(1, size) for size in sizes])
    assert all(1 <= number <= 16 for number in numbers)
    assert open_slices([*(SliceCost(1, size) for size in sizes), None]) == [*numbers, 16]
    taken = [n * size for n, size in zip(numbers, sizes, strict=True)]
    assert all(n == 1 or total <= MAX_SOURCE_BYTES for n, total in zip(numbers, taken, strict=True))
    assert sum(t for n, t in zip(numbers, taken, strict=True) if n > 1) <= BUDGET_BYTES


@pytest.mark.slow
def test_a_blend_of_many_parquet_datasets_takes_no_more_than_one(tmp_path, monkeypatch, kept):
    group = 50 * 10_000
    monkeypatch.setattr(decoded_blocks, "BUDGET_BYTES", 100 * group)
    monkeypatch.setattr(decoded_blocks, "MAX_SOURCE_BYTES", 50 * group)
    table = pa.table({"txt": ["x" * 10_000] * 1000})
    for number in range(25):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=50)
    entries = [{"path": str(tmp_path / f"{n}.parquet")} for n in range(25)]
    blend = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": entries}},
    }
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    most = 0
    with get_loader(get_train_dataset(blend, worker_config=config, batch_size=10)) as loader:
        for _ in islice(loader, 300):
            most = max(most, kept.num_bytes)
    assert 25 * group <= most <= 100 * group
