"""The workers of a rank: its own thread, other threads, processes or Ray actors."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from energon.errors import WorkerError, needs_extra
from energon.io.backends.base import while_needed
from energon.io.threads import fork_safe_rlock
from energon.loader.hosting import InlineWorker, LaneHost
from energon.loader.lane_worker import Event, LaneWorker, Pipeline, WorkerStatus
from energon.loader.monitoring.accounts import HostTrace, TrainerTrace
from energon.loader.options import LoaderOptions, RayWorkers, logger
from energon.loader.state import LanePosition
from energon.messages import counted, warn_once
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


THREAD_CLOSE_SECONDS = 1.0


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
        self._changed = threading.Condition(fork_safe_rlock())
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
