"""Looking at frames while garbage is collected: what CPython 3.11 does not survive on its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from energon.loader.monitoring.profiler import COLLECTS_WITHIN_CALLS, thread_frames
from tests.effort import IN_CI

PROGRAM = """
import _thread
import gc
import sys
import threading
import time
from types import FrameType

from energon.loader.monitoring.profiler import thread_frames


class Waiting:
    def __init__(self):
        self.itself = self

    def __del__(self):
        {wait}


def narrow(count):
    return (wide if count % 3 else narrow)(count - 1) if count else [0].count(0)


def wide(count):
    a, b, c, d, e = [count], count, [count], count, [count]
    found = (narrow if count % 2 else wide)(count - 1) if count else 0
    return found + len(a) + b + len(c) + d + len(e)


def work():
    while looking:
        for count in range(30):
            narrow(count)
            wide(count)


looking = True
worker = threading.Thread(target=work, daemon=True)
worker.start()
sys.setswitchinterval(1e-4)
for number in range({looks}):
    gc.set_threshold(1 + number % 50)
    Waiting()
    with thread_frames() as frames:
        frame = frames[worker.ident]
        for _ in range(100):
            assert frame is None or isinstance(frame, FrameType), frame
            frame = frame and frame.f_back
        assert frame is None
looking = False
worker.join()
gc.collect()  # while the interpreter ends, threads no longer start
"""


@pytest.mark.parametrize(
    "wait",
    [
        # Not threading.Thread, whose own locks may be held where the finalizer is called.
        "lock = _thread.allocate_lock(); lock.acquire(); "
        "_thread.start_new_thread(lock.release, ()); lock.acquire()",
        "time.sleep(0.0005)",
    ],
    ids=["for a thread", "a while"],
)
def test_finalizers_that_wait_do_not_disturb_a_look(wait):
    text = PROGRAM.replace("{wait}", wait).replace("{looks}", "2_000" if IN_CI else "300")
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


@pytest.fixture
def thresholds():
    """Those that the test begins with, which are put back afterwards."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)
    gc.enable()


def collections():
    return sum(each["collections"] for each in gc.get_stats())


def test_garbage_is_collected_afterwards_as_before(thresholds):
    with thread_frames() as frames:
        assert threading.get_ident() in frames
        before = collections()
        _ = [[] for _ in range(10 * thresholds[0])]
        assert (collections() == before) is COLLECTS_WITHIN_CALLS
    assert gc.isenabled()
    assert gc.get_threshold() == thresholds
    _ = [[] for _ in range(10 * thresholds[0])]
    assert collections() > before


def test_collection_that_the_program_disables_during_a_look_stays_disabled(thresholds):
    with thread_frames():
        gc.disable()
    assert not gc.isenabled()
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("threshold", [(0,), (50_000, 5, 5)])
def test_a_threshold_that_the_program_sets_during_a_look_stays(thresholds, threshold):
    with thread_frames():
        gc.set_threshold(*threshold)
    assert gc.get_threshold() == (*threshold, *thresholds[len(threshold) :])


@pytest.mark.skipif(not COLLECTS_WITHIN_CALLS, reason="this Python pauses nothing")
def test_a_threshold_that_was_read_during_a_look_is_not_kept(thresholds):
    with thread_frames():
        read = gc.get_threshold()
    gc.set_threshold(*read)
    with thread_frames():
        pass
    assert gc.get_threshold() == thresholds


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_during_a_look_collects_garbage(thresholds):
    with thread_frames():
        pid = os.fork()
        if not pid:
            os._exit(gc.get_threshold() != thresholds)
    assert os.waitpid(pid, 0)[1] == 0
