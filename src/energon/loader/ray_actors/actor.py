"""What runs in an actor: it hosts lanes, and answers each request with their next batches."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import ray

from energon.errors import ConfigError
from energon.loader.hosting import LaneHost
from energon.loader.lane_worker import Event, LanesToOpen
from energon.loader.memory import keep_heap
from energon.loader.processes.main import report_faults, seed_generators
from energon.loader.transport.events import (
    BUNDLE_BYTES,
    BUNDLE_EVENTS,
    HELD_SECONDS,
    EventWriter,
)
from energon.loader.transport.reports import LogSender, explicit_levels
from energon.loader.transport.slots import PAGE_BYTES, EventLayout, Heartbeat, map_shared
from energon.messages import forget_given
from energon.stages.hooks.random_state import own_process
from energon.version import __version__

CONTROL = "control"
"""The group of requests that are answered while a batch is made."""


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same in training program and actors."""
    return {"energon-loader": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}


@dataclass(frozen=True)
class ActorSetup:
    """What an actor needs to know before it loads the pipeline."""

    name: str
    seed: int
    kept_heap_bytes: int
    log_levels: Mapping[str, int]


class ActorAddress(NamedTuple):
    """Where an actor runs.

    Args:
        host: The name of the machine.
        node: Ray's id of the node.
        pid: Process id there.
        page: Path of its heartbeat page there.
    """

    host: str
    node: str
    pid: int
    page: str


class Look(NamedTuple):
    """What an actor is doing, see `Heartbeat`.

    Args:
        records: Lines of log records.
        page: The content of its heartbeat page.
        stack: What the thread that makes batches is doing; "" unless asked for.
    """

    records: bytes
    page: bytes
    stack: str


class Parcel(NamedTuple):
    """Some events of an actor. Only the last one may have buffers.

    Args:
        look: What the actor was doing afterwards.
        layouts: Where the pickle of each event begins and ends in `head`.
        head: The pickles.
        buffers: The buffers of the last event.
        ended: Whether no more events follow.
    """

    look: Look
    layouts: Sequence[EventLayout]
    head: bytes
    buffers: Sequence[Any]
    ended: bool


class LaneActor:
    """Hosts lanes for a training program, which asks for each parcel of batches."""

    def __init__(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        self._address = ActorAddress(platform.node(), node, os.getpid(), page="")
        self._heartbeat = Heartbeat(bytearray(PAGE_BYTES))
        self._page: int | None = None
        self._records = _Records()
        self._opened = threading.Condition()
        self._thread = 0
        self._process = ProcessSettings.present()
        self._forget()

    def _forget(self) -> None:
        """Be as before lanes were hosted."""
        self._pipeline: Any = None
        self._pool: Any = None
        self._error: BaseException | None = None
        self._opening: tuple[int, LanesToOpen] = 0, LanesToOpen(1, {})
        self._generation = 0
        self._host: LaneHost | None = None
        self._writer = EventWriter()

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that a pipeline will need, if they can be imported."""
        with no_garbage():
            for name in modules:
                with contextlib.suppress(Exception):  # raised when the pipeline is loaded
                    importlib.import_module(name)

    def prepare(self, versions: dict[str, str], setup: bytes, content: bytes) -> ActorAddress:
        """Load the pipeline; if that fails, the first event is the error.

        Args:
            versions: The versions of the training program, see `own_versions`.
            setup: A pickled `ActorSetup`.
            content: The pickled pipeline and its cache pool.
        """
        self._thread = threading.get_ident()
        self._begin_page()
        try:
            check_versions(versions, own_versions(), self._address.host)
            settings: ActorSetup = pickle.loads(setup)
            threading.current_thread().name = settings.name
            keep_heap(settings.kept_heap_bytes)
            sender = LogSender(
                self._records, process_name=f"{settings.name} on {self._address.host}"
            )
            sender.install(dict(settings.log_levels))
            with no_garbage():
                self._pipeline, self._pool = pickle.loads(content)
            seed_generators(settings.seed)
            own_process()
        except BaseException as error:
            error.add_note(f"the pipeline cannot be loaded in a Ray actor on {self._address.host}")
            self._error = error
        return self._address

    def _begin_page(self) -> None:
        path = os.path.join(tempfile.gettempdir(), f"energon-{os.getpid()}-{time.time_ns()}.page")
        page = Heartbeat.create(path)
        self._address = self._address._replace(page=path)
        self._heartbeat = Heartbeat(map_shared(os.dup(page)))
        report_faults(page)
        if self._page is not None:
            os.close(self._page)
        self._page = page

    def clear(self) -> None:
        """Forget the training program and its data, to be prepared for another rank."""
        self._forget()
        self._records.take()
        self._process.restore()
        forget_given()
        gc.unfreeze()
        gc.collect()

    @ray.method(concurrency_group=CONTROL)
    def open(self, generation: int, opening: LanesToOpen) -> None:
        """Host other lanes; requests for parcels of earlier generations are not answered."""
        with self._opened:
            self._opening = generation, opening
            self._opened.notify_all()

    @ray.method(concurrency_group=CONTROL)
    def look(self, with_stack: bool) -> Look:
        """Return the position of this actor, and its log records."""
        stack = ""
        if with_stack and (frame := sys._current_frames().get(self._thread)):
            stack = "".join(traceback.format_stack(frame))
        return self._look(stack)

    @ray.method(concurrency_group=CONTROL)
    def leave(self) -> Look:
        """Remove the heartbeat page, before Ray ends this actor; return the last look."""
        with contextlib.suppress(OSError):
            os.unlink(self._address.page)
        return self._look()

    def _look(self, stack: str = "") -> Look:
        return Look(self._records.take(), self._heartbeat.content, stack)

    def parcel(self, generation: int) -> Parcel:
        """Make the next events of a generation."""
        with self._opened:
            # Requests of the other group may arrive later, although they were made before.
            self._opened.wait_for(lambda: self._opening[0] >= generation)
            current, opening = self._opening
        if current != generation:
            nothing = Look(b"", self._heartbeat.content, "")  # log records would be lost
            return Parcel(nothing, [], b"", [], ended=True)
        if self._generation != generation:
            self._generation = generation
            self._host = None if self._error is not None else self._host_of(opening)
        sink = _Sink()
        layouts: list[EventLayout] = []
        began, ended = perf_counter(), False
        while not ended:
            ended = self._put_next(sink, layouts, opening)
            is_full = sink.buffers or len(sink.head) >= BUNDLE_BYTES
            if is_full or len(layouts) >= BUNDLE_EVENTS or perf_counter() - began > HELD_SECONDS:
                break
        head = bytes(sink.head)
        return Parcel(self._look(), layouts, head, sink.buffers, ended)

    def _host_of(self, opening: LanesToOpen) -> LaneHost:
        return LaneHost(
            self._pipeline,
            opening.positions,
            lanes=opening.lanes,
            pool=self._pool,
            watch=self._heartbeat,
        )

    def _put_next(self, sink: _Sink, layouts: list[EventLayout], opening: LanesToOpen) -> bool:
        """Add the next event to a parcel; return whether no more follow."""
        host = self._host
        lane = min(opening.positions) if host is None else host.lane
        if lane is None:
            return True
        try:
            if host is None:
                raise self._error or ConfigError("this actor has no pipeline")
            event = next(host)
        except BaseException as error:
            self._heartbeat.leave()
            error.add_note(f"raised on {self._address.host}, in process {self._address.pid}")
            layouts.append(self._writer.put(sink, Event(lane, error=error)))
            return True
        began = perf_counter()
        layouts.append(self._writer.put(sink, event))
        del event  # the next batch reuses its memory
        host.sent(began, 0)
        return host.lane is None


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a process that training programs and hooks change."""

    environment: Mapping[str, str]
    working_directory: str
    search_path: Sequence[str]
    log_levels: Mapping[str, int]

    @classmethod
    def present(cls) -> ProcessSettings:
        """Return the present settings of this process."""
        return cls(dict(os.environ), os.getcwd(), list(sys.path), explicit_levels())

    def restore(self) -> None:
        """Let this process have these settings again."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.working_directory)
        sys.path[:] = self.search_path
        for name in explicit_levels():
            logging.getLogger(name or None).setLevel(self.log_levels.get(name, logging.NOTSET))


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Import or load what is kept from now on: looking for garbage in it takes long."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_versions(trainer: Mapping[str, str], actor: Mapping[str, str], host: str) -> None:
    """Raise ConfigError if a version differs between the training program and an actor on `host`.

    Example:
        >>> check_versions({"Python": "3.11"}, {"Python": "3.12"}, "cpu-7")
        Traceback (most recent call last):
            ...
        energon.errors.ConfigError: Ray actors on cpu-7 have Python 3.12, the training program \
has Python 3.11; install the same versions on all machines of the cluster, or name them in \
RayWorkers(runtime_env=...)
    """
    differing = [name for name in trainer if actor.get(name) != trainer[name]]
    if differing:
        theirs = ", ".join(f"{name} {actor.get(name)}" for name in differing)
        ours = ", ".join(f"{name} {trainer[name]}" for name in differing)
        raise ConfigError(
            f"Ray actors on {host} have {theirs}, the training program has {ours}; install the "
            "same versions on all machines of the cluster, or name them in "
            "RayWorkers(runtime_env=...)"
        )


def take_page(path: str) -> bytes:
    """Return the heartbeat page that an actor on this machine has left, and remove it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


class _Sink:
    """Takes the pickles of events, and keeps their buffers apart, for Ray to copy them once."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.buffers: list[Any] = []

    @property
    def position(self) -> int:
        return len(self.head)

    @position.setter
    def position(self, position: int) -> None:
        del self.head[position:]
        self.buffers.clear()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.head += view
        return len(view)

    def write_buffer(self, buffer: PickleBuffer) -> tuple[int, int]:
        self.buffers.append(np.frombuffer(buffer.raw(), np.uint8))
        return 0, len(self.buffers[-1])


class _Records:
    """Collects lines of log records until the next answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = bytearray()

    def sendall(self, line: bytes) -> None:
        with self._lock:
            self._lines += line

    def take(self) -> bytes:
        with self._lock:
            lines = bytes(self._lines)
            self._lines.clear()
        return lines
