"""Write what is done for a window of batches as a trace for Perfetto and Chrome.

The file is an array of events in Chrome's format, to which each process of a rank appends whole
events. The end of the array is written when the loader is closed, so it is missing in the file of a
run that was killed; both viewers accept that.

The times at which batches are made, handed over and waited for are exact. What happens within them
is checked every few milliseconds, as for statistics, so a shorter stage is only seen now and then.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from energon.errors import ConfigError
from energon.io.file_lock import hold_lock
from energon.loader.monitoring.accounts import IDLE, OTHER, REBUILD, TRANSFER, Spent
from energon.loader.monitoring.interpreter import prompt_looks
from energon.loader.monitoring.profiler import Profiled, profiler
from energon.loader.options import LoaderOptions, logger
from energon.loader.pipeline import Pipeline, Reports
from energon.worker import WorkerConfig

TRACE_PERIOD_SECONDS = 0.002
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
        place = {"pid": os.getpid(), "tid": self._thread}
        for span in spans:
            times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.stop - span.start)}
            events.append({"name": span.name, "ph": "X", **times, **place, "args": span.about})
        try:
            append(self._path, "".join(_NEXT + json.dumps(event) for event in events))
        except OSError as error:
            self._is_broken = True
            logger.warning("the trace ends here, since %s cannot be written: %s", self._path, error)

    def _names(self) -> Iterator[dict[str, Any]]:
        place = {"ph": "M", "pid": os.getpid(), "tid": threading.get_native_id()}
        yield {"name": "thread_name", **place, "args": {"name": self._name}}


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
        about = {"name": f"energon rank {config.rank}"}
        event = {"name": "process_name", "ph": "M", "pid": os.getpid(), "tid": 0, "args": about}
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


class TracedHost(Profiled, Protocol):
    """A host of lanes that is traced."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that the lanes run."""


class HostTrace:
    """What a host of lanes does during a window of batches.

    Args:
        options: Name the file and the batches.
        name: What to call the host.
        made: How many batches were made before, by a worker that was replaced.
        hands_over: Whether batches are handed over to another thread or process when they are
            made; False for batches that the trainer makes as it waits.
    """

    def __init__(
        self,
        options: LoaderOptions,
        name: str,
        *,
        made: int = 0,
        hands_over: bool = True,
    ) -> None:
        self._start, self._stop = options.trace_window
        self._made = made
        self._hands_over = hands_over
        self._track = _Track(os.fspath(options.trace or ""), name)
        self._datasets: Sequence[str] | None = None
        self._began = 0.0
        self._handed_over_at: float | None = None
        self._looks: list[tuple[float, Spent]] = []
        self._looker: threading.Thread | None = None
        # When a host is closed and gone, so is the thread that looks at it.
        self._host: weakref.ref[TracedHost] | None = None

    def begin(self, host: TracedHost) -> None:
        """Record that a batch is begun."""
        now = time.perf_counter()
        if self._handed_over_at is not None:
            self._track.write(list(self._within(self._handed_over_at, now, TRANSFER)))
            self._handed_over_at = None
        if not self._start <= self._made < self._stop:
            self._host = None
            return
        self._host, self._began = weakref.ref(host), now
        if self._datasets is None:
            self._datasets = _dataset_names(host.pipeline)
        if self._looker is None or not self._looker.is_alive():
            self._looker = threading.Thread(target=self._look, name="energon trace", daemon=True)
            self._looker.start()

    def end(self, lane: int) -> None:
        """Record that the batch is made."""
        number, self._made = self._made, self._made + 1
        if self._host is None:
            return
        now = time.perf_counter()
        whole = TracedSpan("make a batch", self._began, now, {"lane": lane, "batch": number})
        self._track.write([whole, *self._within(self._began, now, OTHER)])
        self._handed_over_at = now if self._hands_over else None

    def _within(self, start: float, stop: float, default: str) -> Iterator[TracedSpan]:
        """Yield what was seen between two moments, except the loader's own work within a batch."""
        looks, self._looks = self._looks, []
        looks = [look for look in looks if start <= look[0] <= stop]
        if not looks and default == TRANSFER:
            yield TracedSpan(TRANSFER, start, stop, {})
        begun = start
        for number, (at, spent) in enumerate(looks):
            following = looks[number + 1] if number + 1 < len(looks) else None
            if following is not None and following[1] == spent:
                continue
            end = stop if following is None else (at + following[0]) / 2
            if default == TRANSFER and spent.stage != IDLE:
                spent = Spent(TRANSFER)
            if spent.stage != OTHER:
                yield TracedSpan(spent.stage, begun, end, self._about(spent))
            begun = end

    def _about(self, spent: Spent) -> dict[str, Any]:
        known = 0 <= spent.leaf < len(self._datasets or ())
        return {"dataset": self._datasets[spent.leaf]} if known and self._datasets else {}

    def _look(self) -> None:
        """Look at the host while it makes batches of the window."""
        with prompt_looks():
            while (watched := self._host) is not None and (host := watched()) is not None:
                spent = profiler().spent_by(host)
                if spent is not None:
                    now, looks = time.perf_counter(), self._looks
                    # The last of equal looks tells as much as all of them, and a pause may be long.
                    if looks and looks[-1][1] == spent:
                        looks[-1] = now, spent
                    else:
                        looks.append((now, spent))
                del host
                time.sleep(TRACE_PERIOD_SECONDS)


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
