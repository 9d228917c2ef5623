"""Where shards are processed: in this process, in processes of this machine, on Dask or on Ray.

Each engine is a factory of executors as in `concurrent.futures`; `run_batches` works with all of
them.

Decoders are written in C, and the data may be anything, so a process that dies is a finding like
any other: `run_isolated` runs batches at which a process died again one by one, in halves, until a
single number is left.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from queue import SimpleQueue
from traceback import format_tb
from typing import Any, Literal, NamedTuple, TypeVar, cast

from energon.errors import (
    ConfigError,
    EnergonError,
    StorageError,
    StorageFullError,
    WorkerError,
    needs_extra,
)
from energon.io.atomic import close_inherited_locks, is_full
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

Progress = Callable[[int, int], None]
"""Called with the number of finished shards, files or bytes, and the total."""
J = TypeVar("J")
T = TypeVar("T")


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


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
    tries = Counter[int]()
    starts = 0
    while todo:
        starts += 1
        with engine.open() as workers:

            def submit(batch: tuple[int, tuple[Any, ...]]) -> Future[T]:
                return workers.submit(function, *batch[1])

            def failed(batch: tuple[int, tuple[Any, ...]], error: BaseException) -> None:
                _count_try(batch[0], tries, error)

            ahead = workers.number * WAITING_BATCHES
            try:
                for (number, _), result in _run_jobs(submit, todo, todo, failed, ahead=ahead):
                    yield number, result
            except BrokenExecutor as error:
                # All of its processes are gone; their work is in `todo` again.
                if starts == MAX_STARTS:
                    raise WorkerError(
                        f"the processes that read shards died {starts} times, perhaps out of "
                        "memory; run it again with a smaller --num-workers"
                    ) from error
                logger.warning("%s; restarting the processes", error)


def _run_jobs(
    submit: Callable[[J], Future[T]],
    todo: list[J],
    lost: list[J],
    failed: Callable[[J, BaseException], None],
    *,
    ahead: int,
) -> Iterator[tuple[J, T]]:
    """Process jobs from the end of a list, and yield them with their results as these are ready.

    Args:
        submit: Starts a job.
        todo: The jobs; those that have been started are taken out.
        lost: Receives jobs that have been started and have no result.
        failed: Called with a job that failed; raises the error if that ends everything.
        ahead: How many jobs are started before the first one is done.

    Raises:
        BrokenExecutor: If a process has died.
    """
    running: dict[Future[T], J] = {}
    try:
        while todo or running:
            while todo and len(running) < ahead:
                running[submit(todo[-1])] = todo[-1]
                todo.pop()
            done = wait(running, return_when=FIRST_COMPLETED).done
            # Results first: when a process has died, only what has none runs again.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                job, error = running.pop(future), future.exception()
                if error is None:
                    yield job, future.result()
                    continue
                lost.append(job)
                failed(job, error)
                if isinstance(error, BrokenExecutor):
                    raise error
    finally:
        for future in running:
            future.cancel()
        lost += running.values()


def _count_try(number: int, tries: Counter[int], error: BaseException) -> None:
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
    with ProcessPool(engine.num_local) as pool:
        yield Workers(pool.submit, engine.num_local)


class ProcessPool(AbstractContextManager["ProcessPool"]):
    """Runs calls in processes, each of which receives them through a pipe of its own.

    The queues of `ProcessPoolExecutor` have semaphores with names, and a fork server listens in a
    folder. Both would outlast processes that are killed together; a pipe does not.

    Args:
        number: Number of processes.
        initializer: Called first in each process, with `arguments`.
        arguments: Anything that may be passed to a process as it starts.
    """

    def __init__(
        self, number: int, initializer: Callable[..., None] | None = None, *arguments: Any
    ) -> None:
        method = default_start_method()
        context: Any = multiprocessing.get_context("fork" if method == "fork" else "spawn")
        self.processes: list[BaseProcess] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._is_broken = False
        # Processes that are still running when the program exits would be waited for.
        Finalize(self, _kill_all, args=(self.processes,), exitpriority=10)
        for _ in range(number):
            own, end = context.Pipe()
            process = context.Process(target=_serve, args=(end, initializer, arguments))
            process.start()  # before there are threads, since a fork has none of them
            end.close()
            self.processes.append(process)
            self._idle.put(own)
        self._threads = ThreadPoolExecutor(number)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in one of the processes, as soon as one is idle.

        Raises:
            BrokenExecutor: If one of them has died. Pending calls fail with this error, too.
        """
        if self._is_broken:
            raise BrokenExecutor("a process has died")
        return self._threads.submit(self._call, function, arguments)

    def kill(self) -> None:
        """End all processes at once."""
        self._is_broken = True
        _kill_all(self.processes)

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            with self._idle.get() as connection, suppress(OSError):
                connection.send_bytes(b"")
        for process in self.processes:
            process.join()

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        call = ForkingPickler.dumps((function, arguments))
        connection = self._idle.get()
        try:
            connection.send_bytes(call)
            answer = connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.kill()
            raise BrokenExecutor("a process has died") from error
        finally:
            self._idle.put(connection)
        outcome, failure = ForkingPickler.loads(answer)
        if failure is not None:
            raise failure
        return cast(T, outcome)


def _kill_all(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _serve(
    connection: Connection, initializer: Callable[..., None] | None, arguments: tuple[Any, ...]
) -> None:
    """Answer the calls that arrive in a process of a pool."""
    begin_worker()
    if initializer is not None:
        initializer(*arguments)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while call := connection.recv_bytes():
            connection.send_bytes(_answer(call))


def _answer(call: bytes) -> memoryview:
    try:
        function, arguments = ForkingPickler.loads(call)
        return ForkingPickler.dumps((run_unless_interrupted(function, *arguments), None))
    except BaseException as error:
        if not isinstance(error, EnergonError | OSError):
            error.add_note("".join(format_tb(error.__traceback__)))
        try:
            return ForkingPickler.dumps((None, error))
        except Exception:
            return ForkingPickler.dumps((None, WorkerError(describe_error(error))))


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
    # Garbage of the parent is not freed in a fork: FFmpeg would wait there for threads of a scaler
    # that were never copied.
    gc.freeze()
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


AHEAD = 2
"""Batches per process that are handed over before they are needed."""
MAX_DEATHS = 1000
NO_ORDINAL = -1


@dataclass(frozen=True)
class IsolatedCall:
    """A call.

    Args:
        number: Identifies the call for the caller.
        arguments: All arguments except the last.
        ordinals: The last argument, which may be divided.
    """

    number: int
    arguments: tuple[Any, ...]
    ordinals: Sequence[int]

    def cut(self, start: int, stop: int) -> list[IsolatedCall]:
        """Return the calls for the ordinals before one place, and from another one on."""
        cuts = (self.ordinals[:start], self.ordinals[stop:])
        return [IsolatedCall(self.number, self.arguments, some) for some in cuts if len(some)]


def run_isolated(
    engine: Engine, function: Callable[..., T], jobs: Sequence[IsolatedCall], died: Callable[..., T]
) -> Iterator[tuple[int, T]]:
    """Call a function for each job on an engine, and yield the results as they become ready.

    Args:
        engine: Where to run. A cluster calls each job as a whole, see `run_batches`.
        function: Takes the arguments and the ordinals of a job.
        jobs: The calls.
        died: Takes the arguments of a job and an ordinal at which the process died; returns the
            result for this ordinal.

    Yields:
        Number of the job, and the result for all or some of its ordinals, which are complete in the
        end.

    Raises:
        WorkerError: If processes keep dying.
    """
    if engine.name != "local":
        batches = ((*job.arguments, job.ordinals) for job in jobs)
        for at, result in run_batches(engine, function, batches):
            yield jobs[at].number, result
        return
    noted = RawValue("q")
    todo = list(jobs)[::-1]
    suspects: list[IsolatedCall] = []
    deaths = 0
    while todo or suspects:
        alone = bool(suspects)
        lost: list[IsolatedCall] = []
        noted.value = NO_ORDINAL
        with ProcessPool(1 if alone else engine.num_local, _share, noted) as pool:

            def submit(job: IsolatedCall) -> Future[T]:
                arguments = (*job.arguments, job.ordinals)
                return pool.submit(_call_all, function, arguments)

            queue, ahead = (suspects, 1) if alone else (todo, AHEAD * engine.num_local)
            try:
                for job, result in _run_jobs(submit, queue, lost, _raise_unless_dead, ahead=ahead):
                    yield job.number, result
            except BrokenExecutor as error:
                deaths += 1
                if deaths > MAX_DEATHS:
                    raise WorkerError(
                        f"processes that decode samples died {deaths} times, perhaps out of "
                        "memory; run it again with a smaller --num-workers"
                    ) from error
            except BaseException:
                # They only read, and Ctrl-C does not reach one that waits for a store or a decoder.
                pool.kill()
                raise
        if not alone:
            suspects += lost
            continue
        for job in lost:
            if len(job.ordinals) == 1 or noted.value in job.ordinals:
                at = 0 if len(job.ordinals) == 1 else job.ordinals.index(noted.value)
                yield job.number, died(*job.arguments, job.ordinals[at])
                suspects += job.cut(at, at + 1)[::-1]
            else:
                middle = len(job.ordinals) // 2
                suspects += job.cut(middle, middle)[::-1]


def _raise_unless_dead(job: IsolatedCall, error: BaseException) -> None:
    if not isinstance(error, BrokenExecutor):
        raise error


def note(ordinal: int | None) -> None:
    """Record what this process is about to do, so that it is known if it dies.

    Args:
        ordinal: The current one; None if there are several, as when they are read together.
    """
    if _noted is not None:
        _noted.value = NO_ORDINAL if ordinal is None else ordinal


_noted: Any = None
"""Shared with the process that started this one; None if there is none."""


def _share(noted: Any) -> None:
    global _noted
    _noted = noted


def _call_all(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    # What another call has recorded says nothing about this one.
    note(None)
    return function(*arguments)
