from __future__ import annotations

import os
import threading

import pytest

from energon.io.threads import WaitingThreads, fork_safe_lock
from tests.commands import run_python
from tests.waiting import wait_until


def test_runs_everything_with_so_many_threads_at_most():
    threads = WaitingThreads(3, "test")
    barrier = threading.Barrier(3)
    running = threading.active_count()

    def job(number):
        if number < 3:
            barrier.wait(10)
        return number * 2, threading.current_thread().name

    found = [future.result() for future in [threads.submit(job, n) for n in range(50)]]
    assert [value for value, _ in found] == [n * 2 for n in range(50)]
    assert len({name for _, name in found}) <= 3
    assert threading.active_count() <= running + 3


def test_failures_come_back_and_end_no_thread():
    threads = WaitingThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result()
    assert threads.submit(lambda: 5).result() == 5


def test_what_was_cancelled_in_time_is_not_run():
    threads = WaitingThreads(1, "test")
    go, ran = threading.Event(), []
    first = threads.submit(go.wait)
    second = threads.submit(ran.append, 1)
    assert second.cancel()
    go.set()
    first.result()
    threads.submit(int).result(10)
    assert not ran


def test_threads_end_with_who_gave_them_work_when_it_is_done():
    threads = WaitingThreads(2, "of nobody")
    go = threading.Event()
    waiting = [threads.submit(go.wait) for _ in range(3)]
    del threads
    assert sum(thread.name.startswith("of nobody") for thread in threading.enumerate()) == 2
    go.set()
    assert all(future.result() for future in waiting)
    wait_until(lambda: not any(t.name.startswith("of nobody") for t in threading.enumerate()))


def test_a_program_ends_although_a_thread_waits():
    code = (
        "from energon.io.threads import WaitingThreads; import threading;"
        "WaitingThreads(1, 'x').submit(threading.Event().wait)"
    )
    run_python(code)


def test_a_lock_that_a_thread_holds_is_free_in_a_fork():
    lock, held, go = fork_safe_lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        pid = os.fork()
        if not pid:
            os._exit(0 if lock.acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not lock.acquire(blocking=False)
    finally:
        go.set()
        thread.join()
