from __future__ import annotations

import os
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import TruncatedError
from energon.io.backends.local import LocalBackend
from energon.io.range_file import (
    COALESCED_BYTES,
    RemoteObject,
    Span,
    merge_ranges,
    read_ranges,
    span_buffer,
)
from energon.io.store import Store

CONTENT = os.urandom(20 << 20)
ranges = st.lists(st.tuples(*[st.integers(0, len(CONTENT))] * 2).map(sorted), max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    (folder / "x").write_bytes(CONTENT)
    return folder


@pytest.fixture
def content(folder):
    """What one test fetches ahead is not counted in the next one."""
    store = Store(LocalBackend(str(folder)))
    return RemoteObject(store, store.info("x"))


@given(ranges, st.integers(0, 1000), st.integers(1000, 10**7))
def test_merged_ranges_cover_what_went_in_and_leave_out_larger_gaps(ranges, gap, largest):
    start = np.array([a for a, _ in ranges], np.int64)
    stop = np.array([b for _, b in ranges], np.int64)
    merged = merge_ranges(start, stop, gap=gap, largest=largest)
    assert (merged.start[merged.owner] <= start).all()
    assert (merged.stop[merged.owner] >= stop).all()
    assert (np.diff(merged.start) >= 0).all()
    covered = set()
    for a, b in ranges:
        covered |= {a, max(a, b - 1)}
    for low, high in zip(merged.start.tolist(), merged.stop.tolist(), strict=True):
        assert {low, max(low, high - 1)} & covered


@given(ranges)
@settings(max_examples=20, deadline=None)
def test_any_ranges_are_read_at_once_whatever_was_fetched_ahead(folder, ranges):
    store, buffer = Store(LocalBackend(str(folder))), span_buffer()
    content = RemoteObject(store, store.info("x"))
    ahead = [Span(content, 3 << 20, 9 << 20), Span(content, 9 << 20, 10 << 20)]
    for span in ahead:
        buffer.fetch(span)
    starts, stops = [a for a, _ in ranges], [b for _, b in ranges]
    assert read_ranges(content, starts, stops) == [CONTENT[a:b] for a, b in ranges]
    buffer.drop(ahead)


def test_what_was_fetched_ahead_is_not_fetched_again(content):
    buffer, span = span_buffer(), Span(content, 0, 1 << 20)
    buffer.fetch(span)
    span.future.result()
    before = content.store.statistics.snapshot()["bytes_read"]
    assert read_ranges(content, [5, 100], [50, 1000]) == [CONTENT[5:50], CONTENT[100:1000]]
    assert content.store.statistics.snapshot()["bytes_read"] == before
    buffer.drop([span])
    read_ranges(content, [5], [50])
    assert content.store.statistics.snapshot()["bytes_read"] == before + 45


def test_spans_of_a_reader_that_is_collected_while_others_are_dropped_follow_later(content):
    buffer = span_buffer()
    collected, dropped, fetched = (Span(content, start, start + 10) for start in (0, 100, 200))

    def collect():
        buffer.leave([collected], is_last=False)
        yield dropped

    buffer.fetch(collected)
    buffer.fetch(dropped)
    buffer.drop(collect())
    assert dropped.is_dropped
    assert not collected.is_dropped
    buffer.fetch(fetched)
    assert collected.is_dropped
    buffer.leave([fetched], is_last=False)
    assert fetched.is_dropped


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_does_not_wait_for_the_threads_of_readers_that_it_collects(content):
    buffer, span, held, go = span_buffer(), Span(content, 0, 10), Event(), Event()

    def drop():
        held.set()
        go.wait()
        yield span

    buffer.fetch(span)
    thread = Thread(target=buffer.drop, args=[drop()])
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        buffer.leave([span], is_last=True)
        os._exit(0 if span.future is not None and not span.is_dropped else 1)
    go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_long_ranges_are_fetched_in_pieces(content):
    before = content.store.statistics.snapshot()["requests"]
    assert read_ranges(content, [1], [len(CONTENT)]) == [CONTENT[1:]]
    pieces = content.store.statistics.snapshot()["requests"] - before
    assert pieces == -(-(len(CONTENT) - 1) // COALESCED_BYTES)


def test_an_error_of_what_is_fetched_ahead_comes_when_it_is_needed(content):
    span = Span(content, len(CONTENT) - 10, len(CONTENT) + 10)
    span_buffer().fetch(span)
    assert read_ranges(content, [0], [10]) == [CONTENT[:10]]
    with pytest.raises(TruncatedError):
        read_ranges(content, [len(CONTENT) - 5], [len(CONTENT) + 5])
    span_buffer().drop([span])
