"""Host some lanes of a pipeline and yield their batches in the order of delivery.

A rank deals its lanes to workers, each of which is such a host, and takes what it delivers from
whichever has the next lane.

This is the one implementation behind all workers: the training process calls it directly, under
a watchdog that detects when a batch takes too long, a thread puts what it yields into a queue, and
a process sends it through shared memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from heapq import heapify, heappop, heapreplace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from energon.cache.pool import CachePool, activated
from energon.errors import WorkerError, WorkerTimeoutError
from energon.io.threads import read_here
from energon.loader.lane_worker import (
    DescribesRows,
    Event,
    LaneWorker,
    Pipeline,
    WorkerStatus,
)
from energon.loader.monitoring.accounts import BatchClock, HostTrace, TrainerTrace
from energon.loader.options import LoaderOptions, logger
from energon.loader.state import LanePosition
from energon.messages import Lines
from energon.stages.base import DatasetIterator
from energon.stages.hooks.failures import describe_exit, is_of_program
from energon.stages.lane import CurrentItem, Host, Lane


class DeliveryOrder:
    """The delivery order of some lanes of a run, and a position in it.

    Args:
        batches: For each lane, how many of its batches have been delivered.
        lanes: How many lanes the run has in total.

    Example:
        >>> order = DeliveryOrder({0: 1, 2: 0}, lanes=4)
        >>> order.lane
        2
        >>> order.advance()
        >>> order.lane
        0
    """

    def __init__(self, batches: Mapping[int, int], lanes: int) -> None:
        self._lanes = lanes
        self._numbers = [done * lanes + lane for lane, done in batches.items()]
        heapify(self._numbers)
        self.lane = self._numbers[0] % lanes if self._numbers else None
        """The lane whose batch is next; None when all lanes have ended."""

    def advance(self) -> None:
        """Count the next batch as delivered."""
        heapreplace(self._numbers, self._numbers[0] + self._lanes)
        self.lane = self._numbers[0] % self._lanes

    def drop(self) -> None:
        """Drop the lane that was next: it has no more batches."""
        heappop(self._numbers)
        self.lane = self._numbers[0] % self._lanes if self._numbers else None


class HostWatch(Protocol):
    """An observer of a host's progress, see `transport/slots.py`."""

    def enter(self, lane: int) -> None:
        """Record that work on a batch of `lane` begins."""

    def row(self, row: int, several: bool) -> None:
        """Record that user code receives the sample at this row, or several beginning with it."""

    @property
    def next_row(self) -> Callable[[int], object]:
        """A fast function that records the row of a single sample."""

    def leave(self) -> None:
        """Record that the batch is done."""


class LaneHost:
    """The batches of some lanes, in the order of delivery.

    Each lane is opened when its turn comes, so the first batch waits for one lane only. If lanes
    share anything, all of them are opened after the first batch, so that the shared part knows
    them.

    Args:
        pipeline: The pipeline to run.
        positions: Positions at which the hosted lanes continue.
        lanes: Number of lanes of the run.
        pool: The pool that hooks get, if any.
        watch: Notified of every step, if given.
        trace: Notified when batches begin and end, if given.
        is_inline: Whether the trainer makes batches itself, and measures how long that takes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        positions: Mapping[int, LanePosition],
        *,
        lanes: int,
        pool: CachePool | None = None,
        watch: HostWatch | None = None,
        trace: HostTrace | None = None,
        is_inline: bool = False,
    ) -> None:
        read_here()
        self.pipeline = pipeline
        self._is_inline = is_inline
        self._pool = pool
        self._positions = positions
        self._lanes = lanes
        self._watch = watch
        self._trace = trace
        self._order = DeliveryOrder({v: p.batches for v, p in positions.items()}, lanes)
        self._open: dict[int, _OpenLane] = {}
        self._host = Host(has_begun=any(p.batches for p in positions.values()))
        self._clock: BatchClock | None = None

    @property
    def lane(self) -> int | None:
        """The lane of the next event; None after all lanes have ended."""
        return self._order.lane

    def sent(self, began: float, idle_seconds: float) -> None:
        """Record that a batch has been sent.

        Args:
            began: When that began, by `time.perf_counter`.
            idle_seconds: How much of the time since then there was no room for it.
        """
        now = perf_counter()
        self._host.transfer_seconds += now - began - idle_seconds
        if self._trace is not None:
            self._trace.sent(began + idle_seconds, now)

    def __iter__(self) -> LaneHost:
        return self

    def __next__(self) -> Event:
        lane = self._order.lane
        if lane is None:
            raise StopIteration
        began, clock, spans = perf_counter(), self._clock, None
        if clock is None and (self._open or self._trace is not None):
            # The first batch is start-up, not the run.
            clock = self._clock = BatchClock(self._host)
        if self._trace is not None:
            spans = self._trace.begin(self.pipeline)
        if clock is not None and (clock.due_at <= began or spans is not None):
            clock.begin(spans)
        if self._watch is not None:
            self._watch.enter(lane)
        if len(self._open) < len(self._positions) and self._host.shared:
            self._open_others()
        try:
            opened = self._open.get(lane) or self._open_lane(lane)
            batch = next(opened.batches, _END)
        except BaseException as error:
            if isinstance(error, Exception) or is_of_program(error):
                raise
            raise WorkerError(
                f"{describe_exit(error)} was raised by {_raiser(error)}, "
                f"{self._describe_work(lane)}; code that runs in a loader cannot end the program. "
                "Raise SkipSample in a hook to skip a sample, or raise your own error"
            ) from error
        if self._watch is not None:
            self._watch.leave()
        if self._trace is not None:
            self._trace.end(lane)
        if not self._is_inline:
            self._host.batch_seconds += perf_counter() - began
        times = None
        if self._clock is not None and self._host.clock is not None:
            opened.times.update(self._clock.end())
            times = dict(opened.times)
        if batch is _END:
            self._order.drop()
            return Event(lane, counts=dict(opened.lane.counts), times=times, ended=True)
        opened.lane.current.count_batch()
        self._order.advance()
        position = opened.position
        state = None if position.only_counts else pickle.dumps(position.state_dict())
        return Event(lane, batch, state, dict(opened.lane.counts), times)

    def _describe_work(self, lane: int) -> str:
        """Describe what a lane is working on."""
        if lane not in self._open:
            return f"while lane {lane} was opened"
        current = self._open[lane].lane.current
        work = f"in batch {current.batch} of lane {lane}"
        if current.row is None or not isinstance(self.pipeline, DescribesRows):
            return work
        state = self._positions[lane].saved_state()
        sample = self.pipeline.describe_row(lane, self._lanes, current.row, state)
        return f"{work}, at row {current.row}: {sample}"

    def _open_others(self) -> None:
        for number in self._positions:
            if number not in self._open:
                # A lane that cannot be opened fails when its turn comes.
                with suppress(Exception):
                    self._open_lane(number)

    def _open_lane(self, number: int) -> _OpenLane:
        position = self._positions[number]
        lane = Lane(
            number,
            self._lanes,
            seed=self.pipeline.worker_config.seed_offset,
            skip_rows=frozenset(position.skip_rows),
            progress=None if self._watch is None else self._watch.row,
            next_row=None if self._watch is None else self._watch.next_row,
            counts=Counter(position.counts),
            current=CurrentItem(batch=position.batches),
            host=self._host,
        )
        with nullcontext() if self._pool is None else activated(self._pool):
            state = None if position.state is None else position.saved_state()
            batches = self.pipeline.open_lane(lane, state)
        following = iter(batches)
        if self._pool is not None:
            following = _with_pool(following, self._pool, lane.counts)
        times = Counter(position.times)
        opened = self._open[number] = _OpenLane(lane, batches, following, times)
        return opened


class _OpenLane(NamedTuple):
    """A lane that is open.

    Args:
        lane: The lane.
        position: What was opened, which knows its state.
        batches: What yields its batches.
        times: What it has spent time on.
    """

    lane: Lane
    position: DatasetIterator[Any]
    batches: Iterator[Any]
    times: Counter[str]


def _with_pool(batches: Iterator[Any], pool: CachePool, counts: Counter[str]) -> Iterator[Any]:
    """Yield batches, each of which is made while `pool` is the active one."""
    batch = None
    while batch is not _END:
        with activated(pool):
            batch = next(batches, _END)
        for name, count in pool.take_counts().items():
            counts[f"cache {name}"] += count
        yield batch


def _raiser(error: BaseException) -> str:
    """Describe the function and line that raised an exception, and add its notes."""
    (*_, last) = traceback.extract_tb(error.__traceback__) or [None]
    raiser = "C code" if last is None else f"{last.name} ({last.filename}:{last.lineno})"
    return ", ".join([raiser, *getattr(error, "__notes__", ())])


_END = object()


def deal_lanes(lanes: Sequence[int], workers: int) -> list[Sequence[int]]:
    """Deal the lanes of a rank to at most `workers` workers, so that each has at least one.

    Example:
        >>> deal_lanes([1, 3, 5, 7, 9], 2)
        [[1, 5, 9], [3, 7]]
    """
    return [lanes[i::workers] for i in range(min(workers, len(lanes)))]


class RankStream:
    """The batches of a rank from given positions, which advance with every batch.

    Args:
        workers: The workers that host the lanes, as dealt by `deal_lanes`.
        positions: Positions of all lanes of the rank, in order.
        lanes: How many lanes the run has in total.
        epoch_length: Batches of the rank in a virtual epoch; 0 for no end.
        is_pass: Whether the end of a virtual epoch is also that of the pass over the data.

    Attributes:
        delivered: Whether any batch was delivered.
        epoch_is_over: Whether the last batch was the last of a virtual epoch.
    """

    def __init__(
        self,
        workers: Sequence[LaneWorker],
        positions: Mapping[int, LanePosition],
        *,
        lanes: int,
        epoch_length: int = 0,
        is_pass: bool = False,
    ) -> None:
        self.positions = positions
        self.delivered = self.epoch_is_over = False
        self._epoch_length = epoch_length
        self._is_pass = is_pass
        self._epoch_batches = sum(p.epoch_batches for p in positions.values())
        if epoch_length and self._epoch_batches >= epoch_length:
            self.end_epoch()
        self._order = DeliveryOrder({v: p.batches for v, p in positions.items()}, lanes)
        self._lanes = lanes
        self._left = list(positions)
        self._hosts: dict[int, LaneWorker] = {}
        self.deal(workers)

    def deal(self, workers: Sequence[LaneWorker]) -> None:
        """Let these workers host the lanes from here on; what was made ahead is made again."""
        dealt_lanes = deal_lanes(self._left, len(workers))
        for worker, dealt in zip(workers, dealt_lanes, strict=False):
            self._hosts |= dict.fromkeys(dealt, worker)
            worker.open({lane: self.positions[lane] for lane in dealt}, lanes=self._lanes)

    @property
    def lane(self) -> int | None:
        """The lane whose batch is next; None when all lanes have ended."""
        return self._order.lane

    def next_batch(self, prepare: Callable[[Any], Any] | None = None) -> Any:
        """Return the next batch of the rank and count it as delivered.

        Args:
            prepare: Returns what is delivered in place of the batch; if it raises, nothing is.

        Raises:
            StopIteration: If all lanes have ended.
        """
        while (lane := self._order.lane) is not None:
            event = self._hosts[lane].take()
            if event.error is not None:
                raise event.error
            if event.lane != lane:
                raise WorkerError(
                    f"a worker sent a batch of lane {event.lane}, expected lane {lane}; this is a "
                    "defect of energon, please report it"
                )
            batch = event.batch if prepare is None else prepare(event.batch)
            position = self.positions[lane]
            if event.counts is not None:
                position.counts = event.counts
            if event.times is not None:
                position.times = event.times
            if not event.ended:
                position.batches += 1
                position.epoch_batches += 1
                if event.state is None:
                    position.since += 1
                else:
                    position.state, position.since = event.state, 0
                position.ended = False
                self._order.advance()
                self.delivered = True
                self._epoch_batches += 1
                self.epoch_is_over = self._epoch_batches == self._epoch_length
                if self.epoch_is_over:
                    self.end_epoch()
                return batch
            position.ended = True
            self._left.remove(lane)
            self._order.drop()
        raise StopIteration

    def end_epoch(self) -> None:
        """Let the next batch be the first of a virtual epoch."""
        self._epoch_batches = 0
        for position in self.positions.values():
            position.epoch_batches = 0
            position.ended = position.ended or self._is_pass

    def arrived(self) -> Any:
        """Return the batch that is expected next if it is here already, else None."""
        lane = self._order.lane
        event = None if lane is None else self._hosts[lane].arrived()
        return None if event is None else event.batch


def close_all(workers: list[LaneWorker], trace: TrainerTrace | None) -> None:
    """Close `workers` and drop them; they stop in parallel, not one after another."""
    for worker in workers:
        worker.stop()
    while workers:
        workers[-1].close()
        workers.pop()
    if trace is not None:
        trace.close()


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


def _other_stacks() -> Iterator[str]:
    """Yield the stack of each thread except this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines = traceback.format_stack(frame)
            yield f"{names.get(number, number)}:\n{''.join(lines)}"


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
