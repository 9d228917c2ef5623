"""The time that hosts of lanes spend on each stage: in the statistics of lanes, and as a trace.

Statistics are integers by name, so times are microseconds under names made by `account`.

Making batches, reading blocks and sending batches are always measured, and each call of a hook in
some batches, from which the times of hooks are extrapolated. The next batch is measured when the
last one has cost no more than a thousandth of the time since. So the cost is bounded, and the
choice does not depend on how long batches take: all of them are measured if calls take a
millisecond or so.

A trace, for Perfetto and Chrome, has all of it for a window of batches. The file is an array of
events in Chrome's format, to which each process of a rank appends whole events. The end of the
array is written when the loader is closed, so it is missing in the file of a run that was killed;
both viewers accept that. Calls of a hook that follow each other are one event.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple

from energon.errors import ConfigError
from energon.io.atomic import hold_lock
from energon.io.threads import fork_safe_rlock
from energon.loader.lane_worker import Pipeline, Reports
from energon.loader.options import LoaderOptions, logger
from energon.stages.hooks.clock import HookClock, HookSpan
from energon.stages.lane import Host
from energon.worker import WorkerConfig

READ, TRANSFER, OTHER = "read", "transfer", "other"
"""Stages that are not hooks; `other` is the work of the loader between them."""
BATCHES = "batches"
"""All that is done to make batches."""
CHOSEN = "chosen"
"""What is done to make the batches in which hooks are timed, except for reading blocks."""
REBUILD = "rebuild"
"""Rebuilding, in the trainer, of batches that processes have sent."""

CALL_SECONDS = 1.3e-6
"""What it takes to measure a call."""
BATCH_CALLS = 6
"""As many calls take as long as measuring a batch without any: one whose samples meet no hook."""
SHARE = 0.001
"""The share of the time that this may take."""
FIRST_CALLS = 1000
"""How many calls are measured in any case."""

_PREFIX: Final = "time"
_BETWEEN: Final = "\t"
_Kind = Literal["timed", "slow", "calls"]
_FIELDS = {"timed": "seconds", "slow": "slow_seconds", "calls": "slow_calls"}
"""The fields of `Times` by kind."""


class Spent(NamedTuple):
    """What time is spent on.

    Args:
        stage: One of the names above, or the name of a hook.
        leaf: Number of the dataset; -1 if there are several, or none.
    """

    stage: str
    leaf: int = -1


@dataclass
class Times:
    """The time of a stage.

    Args:
        seconds: All of it, or all that was measured.
        slow_calls: Number of calls of a hook that took very long.
        slow_seconds: How long these took in total.
    """

    seconds: float = 0.0
    slow_calls: float = 0
    slow_seconds: float = 0.0


def account(spent: Spent, kind: _Kind = "timed") -> str:
    """Return the name under which statistics of a lane have the microseconds for it."""
    return _BETWEEN.join([_PREFIX, kind, spent.stage, str(spent.leaf)])


def split_accounts(counts: Mapping[str, int]) -> tuple[dict[Spent, Times], dict[str, int]]:
    """Return the times that are in statistics, and what else there is.

    Example:
        >>> times, others = split_accounts({"batches": 3, account(Spent("read", 1)): 250_000})
        >>> times[Spent("read", 1)].seconds, others
        (0.25, {'batches': 3})
    """
    times: dict[Spent, Times] = {}
    others: dict[str, int] = {}
    for name, count in counts.items():
        if not name.startswith(_PREFIX + _BETWEEN):
            others[name] = count
            continue
        _, kind, stage, leaf = name.split(_BETWEEN)
        stage_times = times.setdefault(Spent(stage, int(leaf)), Times())
        number = count if kind == "calls" else count / 1e6
        setattr(stage_times, _FIELDS[kind], number)
    return times, others


class BatchClock:
    """Measures the batches of a host.

    Args:
        host: What the lanes of the host share.

    Attributes:
        due_at: When the calls of hooks are measured again, by `time.perf_counter`.
    """

    def __init__(self, host: Host) -> None:
        self.due_at = 0.0
        self._host = host
        self._hooks = HookClock()
        self._free_calls = FIRST_CALLS
        self._began = self._read_before = 0.0

    def begin(self, spans: list[HookSpan] | None = None) -> None:
        """Measure the calls of hooks in the batch that begins now.

        Args:
            spans: Takes the calls one by one, for a trace.
        """
        self._host.clock, self._read_before = self._hooks, self._host.read_seconds
        self._hooks.spans = spans
        self._began = perf_counter()

    def end(self) -> Counter[str]:
        """Return the times since the last measured batch, as statistics."""
        now = perf_counter()
        host, hooks = self._host, self._hooks
        times = {
            Spent(BATCHES): host.batch_seconds,
            Spent(CHOSEN): now - self._began - (host.read_seconds - self._read_before),
            Spent(READ): host.read_seconds,
            Spent(TRANSFER): host.transfer_seconds,
            **{Spent(name, leaf): taken for (name, leaf), taken in hooks.seconds.items()},
        }
        counts = Counter({account(each): round(1e6 * t) for each, t in times.items() if t})
        for of, slow in hooks.slow.items():
            counts[account(Spent(*of), "slow")] = round(1e6 * sum(slow))
            counts[account(Spent(*of), "calls")] = len(slow)
        calls = hooks.calls + BATCH_CALLS
        self._free_calls -= calls
        self.due_at = now if self._free_calls > 0 else now + calls * CALL_SECONDS / SHARE
        hooks.clear()
        host.batch_seconds, host.read_seconds, host.transfer_seconds = 0.0, 0.0, 0.0
        host.clock = None
        return counts


class CpuTimes(NamedTuple):
    """How long a thread has run, and how long it was ready to run without a CPU, in seconds."""

    used: float
    waited: float


def cpu_times(thread: int) -> CpuTimes | None:
    """Return the CPU times of a thread by its number; None if the system does not report them."""
    try:
        with open(f"/proc/{thread}/schedstat") as file:
            used, waited, *_ = file.read().split()
        return CpuTimes(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


_GAP_SECONDS = 0.0001
"""Calls of a hook that follow each other within this time are one event."""
_OPEN = "[\n"
_NEXT = ",\n"
_CLOSE = "\n]\n"

# A loader may be garbage-collected, and its trace closed, by the thread that is writing.
_writing = fork_safe_rlock()
_closed: set[str] = set()
"""Files of closed loaders, to which threads that are still working add nothing."""


class TracedSpan(NamedTuple):
    """Something that took some time.

    Args:
        name: What happened.
        start: When it began, in seconds of `time.perf_counter`, which processes share.
        stop: When it ended.
        details: Details to show with it.
    """

    name: str
    start: float
    stop: float
    details: dict[str, Any]


class _Track:
    """The line of a trace that a thread writes."""

    def __init__(self, path: str, name: str) -> None:
        self._path = path
        self._name = name
        self._thread = 0
        self._is_broken = False

    def write(self, spans: Sequence[TracedSpan]) -> None:
        """Append `spans` to the file; a full disk ends the trace, not the run."""
        if self._is_broken:
            return
        events = [] if self._thread else list(self._names())
        self._thread = threading.get_native_id()
        thread = {"pid": os.getpid(), "tid": self._thread}
        for span in spans:
            times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.stop - span.start)}
            events.append({"name": span.name, "ph": "X", **times, **thread, "args": span.details})
        try:
            append(self._path, "".join(_NEXT + json.dumps(event) for event in events))
        except OSError as error:
            self._is_broken = True
            logger.warning("the trace ends here, since %s cannot be written: %s", self._path, error)

    def _names(self) -> Iterator[dict[str, Any]]:
        thread = {"ph": "M", "pid": os.getpid(), "tid": threading.get_native_id()}
        yield {"name": "thread_name", **thread, "args": {"name": self._name}}


def append(path: str, text: str) -> None:
    """Add text to a trace as a whole or not at all, unless its loader is closed.

    The system may write only a part of it, for example when the disk becomes full. So processes
    take turns, and an incomplete part is removed: what others have written stays readable.
    """
    with _writing:
        if path in _closed:
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            with suppress(OSError):  # the file system has no locks
                hold_lock(descriptor)
            size = os.fstat(descriptor).st_size
            rest = memoryview(text.encode())
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


class TrainerTrace:
    """The trace of a rank, including the waits of its trainer.

    Args:
        options: Where to write, and which batches to trace.
        config: The rank; each of several ranks has its own file.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, options: LoaderOptions, config: WorkerConfig) -> None:
        path = Path(os.fspath(options.trace or ""))
        if config.world_size > 1:
            path = path.with_suffix(f".rank{config.rank}{path.suffix}")
        self.path = os.path.abspath(path)
        self._next, (self._start, self._stop) = 0, options.trace_window
        self._track = _Track(self.path, f"trainer of rank {config.rank}")
        self._rebuilt: list[TracedSpan] = []
        names = {"name": f"energon rank {config.rank}"}
        event = {"name": "process_name", "ph": "M", "pid": os.getpid(), "tid": 0, "args": names}
        try:
            with open(self.path, "w") as file:
                file.write(_OPEN + json.dumps(event))
        except OSError as error:
            raise ConfigError(
                f"trace={str(options.trace)!r} cannot be written: {error.strerror}; name a file in "
                "an existing folder"
            ) from error
        _closed.discard(self.path)
        self._is_closed = False
        self._process = os.getpid()

    def window(self, workers: int) -> tuple[int, int]:
        """Return which batches each of this many workers traces."""
        return -(-self._start // workers), -(-self._stop // workers)

    def rebuilt(self, start: float, stop: float) -> None:
        """Record that the trainer rebuilt what a process has sent: one or several batches.

        It is part of the trainer's wait, and written together with it.
        """
        if self._start <= self._next < self._stop:
            self._rebuilt.append(TracedSpan(REBUILD, start, stop, {}))

    def waited(self, start: float, stop: float) -> None:
        """Record that the trainer has waited for a batch."""
        number, self._next = self._next, self._next + 1
        if self._start <= number < self._stop:
            wait = TracedSpan("wait for a batch", start, stop, {"batch": number})
            self._track.write([wait, *self._rebuilt])
            self._rebuilt.clear()

    def close(self) -> None:
        """End the array; nothing is added afterwards. A fork leaves that to its parent."""
        if not self._is_closed and self._process == os.getpid():
            self._is_closed = True
            with suppress(OSError):
                append(self.path, _CLOSE)
            _closed.add(self.path)


class HostTrace:
    """The batches that a host of lanes makes during a window.

    Args:
        options: Name the file and the batches.
        name: What to call the host.
        made: How many batches were made before, by a worker that was replaced.
    """

    def __init__(self, options: LoaderOptions, name: str, *, made: int = 0) -> None:
        self._start, self._stop = options.trace_window
        self._made = made
        self._track = _Track(os.fspath(options.trace or ""), name)
        self._datasets: Sequence[str] | None = None
        self._began = 0.0
        self._calls: list[HookSpan] | None = None

    def begin(self, pipeline: Pipeline) -> list[HookSpan] | None:
        """Record that a batch is begun.

        Returns:
            The list to which the calls of hooks are added; None if they are not recorded.
        """
        self._calls = None
        if self._start <= self._made < self._stop:
            if self._datasets is None:
                self._datasets = _dataset_names(pipeline)
            self._began, self._calls = time.perf_counter(), []
        return self._calls

    def end(self, lane: int) -> None:
        """Record that the batch is made."""
        number, self._made = self._made, self._made + 1
        if self._calls is None:
            return
        details = {"lane": lane, "batch": number}
        whole = TracedSpan("make a batch", self._began, time.perf_counter(), details)
        self._track.write([whole, *self._stages(self._calls)])

    def sent(self, start: float, stop: float) -> None:
        """Record that the batch has been sent to the trainer."""
        if self._calls is not None:
            self._track.write([TracedSpan(TRANSFER, start, stop, {})])

    def _stages(self, calls: Sequence[HookSpan]) -> Iterator[TracedSpan]:
        """Yield calls, of which those in a row are one span."""
        spans: list[HookSpan] = []
        for call in calls:
            last = spans[-1] if spans else None
            if last and last[:2] == call[:2] and call.start - last.stop < _GAP_SECONDS:
                spans[-1] = last._replace(stop=call.stop)
            else:
                spans.append(call)
        for name, leaf, start, stop in spans:
            is_known = self._datasets is not None and 0 <= leaf < len(self._datasets)
            details = {"dataset": self._datasets[leaf]} if is_known and self._datasets else {}
            yield TracedSpan(name, start, stop, details)


def _dataset_names(pipeline: Pipeline) -> Sequence[str]:
    if not isinstance(pipeline, Reports):
        return ()
    try:
        report = pipeline.report(lanes=pipeline.default_lanes, states={}, counts={})
        return list(report["datasets"])
    except Exception:
        # A missing name must not end a run: custom pipelines may need states.
        logger.debug("a trace without names of datasets", exc_info=True)
        return ()
