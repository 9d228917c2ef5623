"""Where shards are processed: in this process, in processes of this machine, on Dask or on Ray.

Each engine is a factory of executors as in `concurrent.futures`; `run_batches` works with all of
them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from energon.errors import (
    ConfigError,
    EnergonError,
    StorageError,
    StorageFullError,
    WorkerError,
    needs_extra,
)
from energon.io.atomic import is_full
from energon.io.file_lock import close_inherited_locks
from energon.io.threads import read_here
from energon.messages import describe_error
from energon.worker import default_start_method

logger = logging.getLogger("energon")
EngineName = Literal["local", "dask", "ray"]
ENGINES: tuple[EngineName, ...] = ("local", "dask", "ray")
MAX_TRIES = 3
MAX_STARTS = 5
WAITING_BATCHES = 4
"""Batches per worker that are submitted ahead."""

ENGINE_START_SECONDS = 20.0

T = TypeVar("T")


class Workers(NamedTuple):
    """Something that runs functions."""

    submit: Callable[..., Future[Any]]
    """Submits a call of a function with arguments, and returns a future."""
    number: int
    """Number of calls that run at the same time."""


@dataclass(frozen=True)
class Engine:
    """Where to run.

    Args:
        name: "local", "dask" or "ray".
        address: Address of the scheduler or head; None starts a cluster on this machine.
        num_workers: Maximum number of processes on this machine.
    """

    name: EngineName = "local"
    address: str | None = None
    num_workers: int = 16

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError(f"engine {self.name!r}: expected one of {', '.join(ENGINES)}")
        if self.name == "local" and self.address is not None:
            raise ConfigError(f"engine 'local' has no address, found {self.address!r}")
        if self.num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, found {self.num_workers}")

    @property
    def num_local(self) -> int:
        """How many processes are started, if they run on this machine."""
        return min(self.num_workers, len(os.sched_getaffinity(0)))

    def open(self) -> AbstractContextManager[Workers]:
        """Start or join the engine.

        Raises:
            MissingExtraError: If the package of the engine is not installed.
            WorkerError: If the cluster cannot be reached.
        """
        return {"local": _local, "dask": _dask, "ray": _ray}[self.name](self)


def run_batches(
    engine: Engine, function: Callable[..., T], batches: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[int, T]]:
    """Call a function with the arguments of each batch on an engine, and yield the results.

    Calls that fail for a transient reason, such as a lost worker or an overloaded network, are
    retried. The first other error ends everything.

    Yields:
        The number of a batch and its result, in the order of completion.

    Raises:
        EnergonError: If the function raised it.
        WorkerError: If workers are lost again and again.
    """
    todo = list(enumerate(batches))[::-1]
    tries = [0] * len(todo)
    starts = 0
    while todo:
        starts += 1
        with engine.open() as workers:
            try:
                yield from _run(workers, function, todo, tries)
            except BrokenExecutor as error:
                # All of its processes are gone; their work is in `todo` again.
                if starts == MAX_STARTS:
                    raise WorkerError(
                        f"the processes that read shards died {starts} times, perhaps for lack of "
                        "memory; run it again with a smaller --num-workers"
                    ) from error
                logger.warning("%s; restarting the processes", error)


def _run(
    workers: Workers,
    function: Callable[..., T],
    todo: list[tuple[int, tuple[Any, ...]]],
    tries: list[int],
) -> Iterator[tuple[int, T]]:
    running: dict[Future[T], tuple[int, tuple[Any, ...]]] = {}
    try:
        while todo or running:
            while todo and len(running) < workers.number * WAITING_BATCHES:
                running[workers.submit(function, *todo[-1][1])] = todo[-1]
                todo.pop()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                batch = running.pop(future)
                error = future.exception()
                if error is None:
                    yield batch[0], future.result()
                    continue
                todo.append(batch)
                _count_try(batch[0], tries, error)
                if isinstance(error, BrokenExecutor):
                    raise error
    finally:
        for future, batch in running.items():
            future.cancel()
            todo.append(batch)


def _count_try(number: int, tries: list[int], error: BaseException) -> None:
    """Record that a batch failed, and raise the error if a retry is pointless."""
    cause = error.__cause__ if not isinstance(error, EnergonError) else None
    if cause is not None and (isinstance(cause, EnergonError) or is_full(cause)):
        error = cause  # some engines wrap what was raised on the worker
    if isinstance(error, EnergonError) and not isinstance(error, StorageError):
        raise error
    if isinstance(error, PermissionError | StorageFullError) or is_full(error):
        raise error
    tries[number] += 1
    if tries[number] >= MAX_TRIES:
        if isinstance(error, EnergonError):
            raise error
        raise WorkerError(
            f"batch {number} failed {MAX_TRIES} times, the last time with {describe_error(error)}"
        ) from error
    logger.warning("batch %d failed with %s; retrying", number, describe_error(error))


@contextmanager
def _local(engine: Engine) -> Iterator[Workers]:
    if engine.num_local == 1:
        yield Workers(_call, 1)
        return
    # A few shards need no processes, nor the time to import what starts them.
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context(default_start_method())
    pool = ProcessPoolExecutor(engine.num_local, mp_context=context, initializer=begin_worker)

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return pool.submit(run_unless_interrupted, function, *arguments)

    try:
        yield Workers(submit, engine.num_local)
    finally:
        pool.shutdown(cancel_futures=True)


class _Interrupt:
    """Handles Ctrl-C in a worker process by ending the current call cleanly.

    Ending the process is left to the pool: as soon as one dies, the pool kills all others.
    """

    def __init__(self) -> None:
        self.happened = False
        self.at_work = False

    def __call__(self, *_: object) -> None:
        self.happened = True
        if self.at_work:
            sys.exit(130)


_interrupt = _Interrupt()


def begin_worker() -> None:
    """Let Ctrl-C end the calls of this process without a traceback, and end it with its parent."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    close_inherited_locks()
    read_here()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # a fork lacks its threads, and would wait for them
    threading.Thread(target=_leave_with_the_main_process, daemon=True).start()


def _leave_with_the_main_process() -> None:
    from multiprocessing import parent_process

    main = parent_process()
    if main is not None:
        main.join()
        os._exit(1)


def run_unless_interrupted(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; raise SystemExit on Ctrl-C, and on every later call."""
    _interrupt.at_work = True
    try:
        if _interrupt.happened:
            sys.exit(130)
        return function(*arguments)
    finally:
        _interrupt.at_work = False


def _call(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


@contextmanager
def _dask(engine: Engine) -> Iterator[Workers]:
    with needs_extra("dask", "--engine dask needs dask.distributed"):
        from distributed import Client
    options: dict[str, Any] = {"address": engine.address}
    if engine.address is None:
        options = {"n_workers": engine.num_local, "threads_per_worker": 1}
    try:
        client: Any = Client(**options)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"no Dask scheduler answers at {engine.address}: {error}; start one with "
            "`dask scheduler`, and pass its address with --address"
        ) from error
    with client:
        executor = client.get_executor(pure=False)
        yield Workers(executor.submit, max(1, sum(client.ncores().values())))


@contextmanager
def _ray(engine: Engine) -> Iterator[Workers]:
    with needs_extra("ray", "--engine ray needs Ray"):
        import ray
    options: dict[str, Any] = {"address": engine.address}
    if engine.address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {"address": "local", "num_cpus": engine.num_local, "include_dashboard": False}
    try:
        _knock(engine.address)
        ray.init(log_to_driver=False, logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise WorkerError(
            f"no Ray cluster answers at {engine.address}: {error}; start one with `ray start "
            "--head`, pass its address with --address, and if it requires a token, set "
            "RAY_AUTH_MODE=token"
        ) from error

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = ray.remote(function).remote(*arguments).future()
        return future

    try:
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        yield Workers(submit, max(1, int(resources.get("CPU", 1))))
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray itself would retry for many minutes."""
    import socket

    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), ENGINE_START_SECONDS).close()
