"""Write what is done for a window of batches as a trace for Perfetto and Chrome.

The file is an array of events in Chrome's format, to which each process of a rank appends whole
events. The end of the array is written when the loader is closed, so it is missing in the file of a
run that was killed; both viewers accept that.

All times are measured: batches are made, sent, rebuilt and waited for, and within them blocks are
read and hooks called. Calls of a hook that follow each other are one event.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from energon.errors import ConfigError
from energon.io.atomic import hold_lock
from energon.loader.monitoring.accounts import REBUILD, TRANSFER
from energon.loader.options import LoaderOptions, logger
from energon.loader.pipeline import Pipeline, Reports
from energon.stages.hooks.clock import HookSpan
from energon.worker import WorkerConfig

_GAP_SECONDS = 0.0001
"""Calls of a hook that follow each other within this time are one event."""
_OPEN = "[\n"
_NEXT = ",\n"
_CLOSE = "\n]\n"

_writing = threading.Lock()
_closed: set[str] = set()
"""Files of closed loaders, to which threads that are still working add nothing."""


class TracedSpan(NamedTuple):
    """Something that took some time.

    Args:
        name: What happened.
        start: When it began, in seconds of `time.perf_counter`, which processes share.
        stop: When it ended.
        about: Details to show with it.
    """

    name: str
    start: float
    stop: float
    about: dict[str, Any]


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
            events.append({"name": span.name, "ph": "X", **times, **thread, "args": span.about})
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
        """End the array; nothing is added afterwards."""
        if not self._is_closed:
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
