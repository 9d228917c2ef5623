"""Looking at frames while garbage is collected: what CPython 3.11 does not survive on its own."""

from __future__ import annotations

import gc
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


def test_garbage_is_collected_afterwards_as_before():
    with thread_frames() as frames:
        assert threading.get_ident() in frames
        assert gc.isenabled() is not COLLECTS_WITHIN_CALLS
    assert gc.isenabled()
    gc.disable()
    try:
        with thread_frames():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
