"""The workers of a rank: its own thread or other threads, and processes from `processes/`.

A watchdog detects when a thread takes too long.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from energon.errors import WorkerError, WorkerTimeoutError, needs_extra
from energon.io.backends.base import while_needed
from energon.loader.hosting import LaneHost
from energon.loader.lane_worker import Event, LaneWorker, Pipeline, WorkerStatus
from energon.loader.monitoring.accounts import HostTrace, TrainerTrace
from energon.loader.options import LoaderOptions, RayWorkers, logger
from energon.loader.state import LanePosition
from energon.messages import Lines, counted, warn_once
from energon.worker import WorkerConfig

if TYPE_CHECKING:
    from energon.loader.ray_actors.workers import ActorSupply


def number_of_workers(options: LoaderOptions, config: WorkerConfig) -> int:
    """Return how many workers the rank of `config` has."""
    workers = options.workers
    if not isinstance(workers, RayWorkers):
        return config.num_workers
    if workers.pool is not None and config.is_replicated:
        return max(1, (workers.num_actors or 1) // config.world_size)
    return workers.max_actors or workers.num_actors or max(1, config.num_workers)


def make_workers(
    pipeline: Pipeline,
    options: LoaderOptions,
    *,
    lanes: int,
    ranks: int = 1,
    trace: TrainerTrace | None,
    actors: ActorSupply | None = None,
) -> list[LaneWorker]:
    """Return the workers of a rank: as many as its configuration says, but at most one per lane.

    Args:
        pipeline: The pipeline that the lanes run.
        options: How to host lanes.
        lanes: The number of lanes of the rank.
        ranks: The number of ranks that share the workers.
        trace: The trace of the rank, if there is one.
        actors: Where Ray actors come from; None if workers are something else.
    """
    config = pipeline.worker_config
    wanted = number_of_workers(options, config)
    number = min(wanted, lanes)
    if trace is not None:
        window = trace.window(max(1, number))
        options = replace(options, trace=trace.path, trace_batches=window)
    elif options.trace is not None:  # its file is complete: the loader has been closed
        options = replace(options, trace=None)
    if number < wanted:
        warn_once(
            logger,
            f"idle workers {wanted} {lanes}",
            "%d of %d workers have nothing to do: this rank has %s, each of which one worker "
            "hosts. Use fewer workers, or give the run more lanes with WorkerConfig(lanes=...)",
            wanted - number,
            wanted,
            counted(lanes, "lane"),
        )
    if number == 0:
        return [InlineWorker(pipeline, options)]
    names = [f"energon rank {config.rank} worker {i}" for i in range(number)]
    if options.workers == "thread":
        return [ThreadWorker(pipeline, options, name=name) for name in names]
    rebuilt = None if trace is None else trace.rebuilt
    if actors is not None:
        with needs_extra("ray", "workers='ray' needs Ray"):
            from energon.loader.ray_actors.workers import make_actor_workers

        return list(make_actor_workers(pipeline, actors, options, names=names, rebuilt=rebuilt))
    from energon.loader.processes.link import make_process_workers

    return list(make_process_workers(pipeline, options, names=names, ranks=ranks, rebuilt=rebuilt))


WATCHED_SECONDS = 10.0
"""The watching thread checks at least this often whether it is still needed."""


class _HangError(BaseException):
    """Raised in a thread that is to stop what it is doing."""


class Watchdog:
    """Watches a thread while it is in a `with` block, and calls a function if it hangs there.

    Args:
        what: What takes too long, for the log.
        on_timeout: Called from another thread, after the stacks of all threads were logged. If it
            raises, the watched thread gets a `WorkerTimeoutError` that says so, as soon as it runs
            Python code again. None only logs.
        seconds: How long a block may take; None for no limit. May be set before each block.
    """

    def __init__(
        self,
        what: str,
        on_timeout: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> None:
        self.what = what
        self.on_timeout = on_timeout
        self.seconds = seconds
        self._watched = 0
        self._raised: Exception | None = None
        self._known_to: object = None
        # Read and cleared by another thread.
        self.deadline: float | None = None
        self.was_used = False

    def __getstate__(self) -> dict[str, object]:
        return {"what": self.what, "on_timeout": self.on_timeout, "seconds": self.seconds}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __enter__(self) -> None:
        self._raised = None
        if self.seconds is None:
            return
        self._watched, self.was_used = threading.get_ident(), True
        # No lock is taken, for batches that take no longer than that. First the deadline is set
        # or cleared, then the clock is checked, which does the same the other way round.
        self.deadline = deadline = time.monotonic() + self.seconds
        if deadline < _clock.looks_at or self._known_to is not _clock.watchdogs:
            self._known_to = _clock.watchdogs
            _clock.start(self, deadline)

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """End the block.

        Raises:
            WorkerTimeoutError: If it hung, and `on_timeout` raised.
        """
        self.deadline = None
        if _clock.is_looking:
            with _clock.changed:
                pass
        if error is not None and self._raised is not None:
            raise WorkerTimeoutError(str(self._raised)) from error

    def trigger(self) -> None:
        """Log what all threads are doing, and call the function."""
        logger.warning(
            "Watchdog triggered: %s takes longer than %g s; what the threads do:\n%s",
            self.what,
            self.seconds,
            Lines("\n".join(_other_stacks())),
        )
        try:
            if self.on_timeout is not None:
                self.on_timeout()
        except Exception as error:
            self._raised = error
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._watched), ctypes.py_object(_HangError)
            )


class _Clock:
    """The thread that triggers watchdogs: one per process, while any watchdog is in use."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
        # When the thread checks next. It is woken only for an earlier deadline: waking it for each
        # batch would take longer than some batches do.
        self.looks_at = math.inf
        self.is_looking = False
        self._thread: threading.Thread | None = None

    def start(self, watchdog: Watchdog, deadline: float) -> None:
        """Make sure that the deadline of `watchdog` is checked in time."""
        with self.changed:
            self.watchdogs.add(watchdog)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._wait, name="energon watchdog", daemon=True
                )
                self._thread.start()
            elif deadline < self.looks_at:
                self.changed.notify()

    def _wait(self) -> None:
        while True:
            with self.changed:
                # Before the deadlines are checked: anyone who sets one from now on calls `start`.
                self.looks_at, self.is_looking = math.inf, True
                now = time.monotonic()
                for watchdog in list(self.watchdogs):
                    if watchdog.deadline is not None and watchdog.deadline <= now:
                        watchdog.deadline = None
                        watchdog.trigger()
                self.is_looking = False
                deadlines = [watchdog.deadline for watchdog in self.watchdogs]
                due = [deadline for deadline in deadlines if deadline is not None]
                used = [watchdog for watchdog in self.watchdogs if watchdog.was_used]
                if not due and not used:
                    # Loaders that are no longer used keep no thread alive.
                    self._thread = None
                    return
                for watchdog in used:
                    watchdog.was_used = False
                self.looks_at = min([*due, now + WATCHED_SECONDS])
                self.changed.wait(self.looks_at - now)


_clock = _Clock()
# A forked process has no such thread, and may have inherited the lock while it was held.
os.register_at_fork(after_in_child=_clock.__init__)  # type: ignore[misc]


THREAD_CLOSE_SECONDS = 1.0


class InlineWorker:
    """Host lanes in the thread that asks for batches; nothing is done in advance."""

    def __init__(self, pipeline: Pipeline, options: LoaderOptions) -> None:
        self._pipeline = pipeline
        self._options = options
        self._host: LaneHost | None = None
        self._trace = None
        if options.trace is not None:
            name = "batches in the training process"
            self._trace = HostTrace(options, name)
        self._watchdog = Watchdog(
            "a batch",
            self._fail if options.fail_on_timeout else None,
            options.watchdog_initial_timeout_seconds,
        )
        self._thread: int | None = None

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Begin to host these lanes."""
        self._thread = threading.get_native_id()
        pool = self._options.cache_pool
        self._host = LaneHost(
            self._pipeline, positions, lanes=lanes, pool=pool, trace=self._trace, is_inline=True
        )

    def take(self) -> Event:
        """Make the next event."""
        if self._host is None:
            raise WorkerError("this loader is closed; build a new one")
        with self._watchdog:
            event = next(self._host)
        self._watchdog.seconds = self._options.watchdog_timeout_seconds
        return event

    @property
    def shared(self) -> None:
        """None: events are made here."""

    def arrived(self) -> None:
        """Return None: events are made when they are taken."""

    def _fail(self) -> None:
        raise WorkerTimeoutError(
            f"a batch takes longer than {self._watchdog.seconds:g} s in the training "
            "process; look for the cause in the stacks that were logged, or use worker processes, "
            "which are replaced when they hang"
        )

    @property
    def status(self) -> WorkerStatus:
        """Return its status."""
        return WorkerStatus("the training process", os.getpid(), 0, self._thread)

    def stats(self) -> dict[str, int]:
        """Return nothing: the caller sees whatever happens here."""
        return {}

    def stop(self) -> None:
        """Do nothing: nothing is running."""

    def close(self) -> None:
        """Drop the lanes."""
        self._host = None


class ThreadWorker:
    """Host lanes in a thread that keeps `prefetch_factor` batches ready."""

    def __init__(self, pipeline: Pipeline, options: LoaderOptions, *, name: str) -> None:
        self._pipeline = pipeline
        self._options = options
        self._name = name
        self._channel = _Channel(0)
        self._thread: threading.Thread | None = None
        self._timeouts = 0
        self._timeout = options.watchdog_initial_timeout_seconds
        self._trace = None if options.trace is None else HostTrace(options, name)

    def open(self, positions: Mapping[int, LanePosition], *, lanes: int) -> None:
        """Start a thread that hosts these lanes; the previous one ends after its current batch."""
        self._channel.close()
        self._channel = _Channel(self._options.prefetch_factor)
        # The caller advances the positions while the thread is still opening lanes at them.
        starts = {lane: replace(position) for lane, position in positions.items()}
        pool = self._options.cache_pool
        host = LaneHost(self._pipeline, starts, lanes=lanes, pool=pool, trace=self._trace)
        self._thread = threading.Thread(
            target=_host_into, args=(host, self._channel), name=self._name, daemon=True
        )
        self._thread.start()

    def take(self) -> Event:
        """Return the next event; log, or raise if asked to, when that takes too long."""
        event = self._channel.get(self._timeout)
        if event is None and not self._channel.is_closed:
            self._timeouts += 1
            text = (
                f"{self._name} has not made a batch for {self._timeout:g} s; threads cannot be "
                "replaced, use workers='process' for code that may hang"
            )
            if self._options.fail_on_timeout:
                raise WorkerError(text)
            logger.warning("%s; still waiting", text)
            event = self._channel.get(None)
        if event is None:
            raise WorkerError("this loader is closed; build a new one")
        self._timeout = self._options.watchdog_timeout_seconds
        return event

    @property
    def shared(self) -> None:
        """None: events are made in this process."""

    def arrived(self) -> Event | None:
        """Return the next event if there is one."""
        return self._channel.peek()

    @property
    def status(self) -> WorkerStatus:
        """Return its status."""
        thread = None if self._thread is None else self._thread.native_id
        return WorkerStatus(self._name, os.getpid(), len(self._channel), thread)

    def stats(self) -> dict[str, int]:
        """Return how often the watchdog expired."""
        return {"worker_timeouts": self._timeouts}

    def stop(self) -> None:
        """Let the thread end after its current batch."""
        self._channel.close()

    def close(self) -> None:
        """Let the thread end, and wait for it briefly."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(THREAD_CLOSE_SECONDS)


class _Channel:
    """A queue of bounded length that either side can close."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> bool:
        """Append `event`, waiting for room; return whether the other side is still open."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or len(self._events) < self._size)
            self._events.append(event)
            self._changed.notify_all()
            return not self.is_closed

    def get(self, timeout: float | None) -> Event | None:
        """Return the next event, or None after `timeout` seconds or once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or bool(self._events), timeout)
            if self.is_closed or not self._events:
                return None
            self._changed.notify_all()
            return self._events.popleft()

    def peek(self) -> Event | None:
        """Return the next event without taking it, or None if there is none yet."""
        with self._changed:
            return self._events[0] if self._events else None

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._events.clear()
            self._changed.notify_all()


def _other_stacks() -> Iterator[str]:
    """Yield the stack of each thread except this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines = traceback.format_stack(frame)
            yield f"{names.get(number, number)}:\n{''.join(lines)}"


def _host_into(host: LaneHost, channel: _Channel) -> None:
    """Put the events of `host` into `channel` until either ends."""
    with while_needed(lambda: not channel.is_closed):
        while (lane := host.lane) is not None:
            try:
                event = next(host)
            except BaseException as error:
                channel.put(Event(lane, error=error))
                return
            if not channel.put(event):
                return
            del event  # the trainer may have dropped the batch, whose memory the next one reuses
