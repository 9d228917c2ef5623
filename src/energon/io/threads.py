"""Daemon threads for requests, and locks and checks for forked processes.

The standard library joins its pool threads at exit, so a program could not end while a store does
not answer. These are daemons: requests still running at exit are abandoned.

The library that talks to object stores has threads of its own, which a fork lacks; a request there
would wait for them forever. So a process either uses the library or forks workers. Which of the two
it does is decided here: by what it does first.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import closing
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from energon.errors import StorageError
from energon.io.backends.base import request_is_needed, while_needed
from energon.worker import default_start_method

_used_in: int | None = None
"""The process in which the library is used; a fork has this of its parent."""
_reads_samples = False
_forks = False


def read_here() -> None:
    """Let this process use the library from now on, unless it forks workers or is such a fork.

    Called by all that read samples, which is too much to go through another process.
    """
    global _reads_samples
    if not _forks:
        _reads_samples = True


def keep_forkable() -> None:
    """Let this process not use the library from now on, unless it has begun to read samples."""
    global _forks
    _forks = not _reads_samples


def reads_here() -> bool:
    """Return whether requests are made by this process itself, not by its reader process."""
    if _used_in not in (None, os.getpid()):
        return False
    return _reads_samples or default_start_method() != "fork"


def library_is_used_here() -> bool:
    """Return whether the threads of the library run in this process, so that no fork can read."""
    return _used_in == os.getpid()


def check_process(origin: str) -> None:
    """Record that this process talks to `origin` through threads that no child inherits.

    Raises:
        StorageError: If this process was forked from one that had already done so.
    """
    global _used_in
    pid = os.getpid()
    if _used_in is None:
        _used_in = pid
    elif _used_in != pid:
        raise StorageError(
            f"{origin}: process {pid} was forked from {_used_in}, which had read from an object "
            "store before; its connections cannot be used in a fork. Open the store by its address"
        )


def _forget_decision() -> None:
    global _reads_samples, _forks
    _reads_samples = _forks = False


os.register_at_fork(after_in_child=_forget_decision)


_locks: weakref.WeakSet[threading.Lock | threading.RLock] = weakref.WeakSet()


def fork_safe_lock() -> threading.Lock:
    """Return a lock that is free in a fork, which lacks the thread that may have held it.

    It may guard steps that leave nothing half-done where they are cut off.
    """
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def fork_safe_rlock() -> threading.RLock:
    """Return such a lock that the thread which holds it may take again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], bool] | None, Callable[..., Any], tuple[Any, ...]]


class WaitingThreads:
    """Runs functions in up to `count` threads, in the order of submission.

    Args:
        count: Maximum number of threads, started on demand.
        name: Prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._begin()
        _every_pool.add(self)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `function(*arguments)` as soon as a thread is free.

        Its requests are needed as long as those of this thread, see `while_needed`.
        """
        future: Future[T] = Future()
        self._jobs.put((future, request_is_needed(), function, arguments))
        if not self._idle.acquire(blocking=False):
            with self._lock:
                if self._threads < self._count:
                    self._threads += 1
                    threading.Thread(
                        target=_work,
                        args=(self._jobs, self._idle),
                        name=f"{self._name}-{self._threads}",
                        daemon=True,
                    ).start()
        return future

    def close(self) -> None:
        """Let the threads end once all submitted calls are done."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def __del__(self) -> None:
        # The lock is not needed: this was the last reference.
        for _ in range(self._threads):
            self._jobs.put(None)


_every_pool: weakref.WeakSet[WaitingThreads] = weakref.WeakSet()


def _reset_after_fork() -> None:
    """Begin without threads, which a fork does not have, and with free locks."""
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[union-attr]
    for pool in list(_every_pool):
        pool._begin()


os.register_at_fork(after_in_child=_reset_after_fork)


def _work(jobs: SimpleQueue[_Job | None], idle: threading.Semaphore) -> None:
    """Do one job after the other; the thread holds what it waits for, and not who gives it."""
    while (job := jobs.get()) is not None:
        future, is_needed, function, arguments = job
        if future.set_running_or_notify_cancel():
            try:
                with while_needed(is_needed):
                    future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        # An idle thread must not hold on to what it read last.
        del job, future, is_needed, function, arguments
        idle.release()


MAX_CALLS_AHEAD = 16
"""How many calls wait for stores at the same time before their results are needed."""


class CallsAhead:
    """Calls that threads have begun before their results are needed, by key.

    Leaving the block drops the calls that have not begun.
    """

    def __init__(self) -> None:
        self._threads = WaitingThreads(MAX_CALLS_AHEAD, "energon-ahead")
        self._coming: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._coming.values():
            future.cancel()
        self._threads.close()

    def begin(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call, unless there is one of this key."""
        if key not in self._coming:
            self._coming[key] = self._threads.submit(function, *arguments)

    def result(self, key: Hashable, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of the call of this key, or call the function here if there is none."""
        future = self._coming.get(key)
        return function(*arguments) if future is None else future.result()


def results_of(futures: Sequence[Future[T]]) -> list[T]:
    """Wait for calls and return their results; after a failure, drop those that have not begun."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def run_in_threads(run: Callable[[T], None], items: Sequence[T], *, count: int) -> None:
    """Call `run` for all items, `count` at a time; stop at the first failure."""
    with closing(WaitingThreads(count, "energon-items")) as threads:
        results_of([threads.submit(run, item) for item in items])
