"""What a worker process does: host lanes and send what they yield, until the parent exits."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from energon.cache.pool import CachePool
from energon.loader.hosting import LaneHost
from energon.loader.lane_worker import Event, LanesToOpen, Pipeline
from energon.loader.memory import keep_heap
from energon.loader.monitoring.accounts import HostTrace
from energon.loader.options import LoaderOptions
from energon.loader.transport.events import Message, MessageKind, Outbox, is_readable, receive
from energon.loader.transport.pickling import copy_for_worker, send_as_inherited
from energon.loader.transport.reports import LogSender, explicit_levels
from energon.loader.transport.slots import (
    LEASES,
    Heartbeat,
    SlotPool,
    map_shared,
    read_shared,
    seek_to_trace,
)
from energon.stages.hooks.random_state import own_process

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a program, unless the program handles them."""

GRACE_SECONDS = 0.5
"""How long workers may take to exit on their own, once the training process is gone."""


def leave_signals_to_parent() -> None:
    """Let only the training process react to ^C and to SIGTERM for the whole process group.

    It may need a few more batches to save a checkpoint. Handlers are used, because programs started
    from here would inherit that a signal is ignored.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def leave_handlers_to_parent() -> None:
    """Let only the training process react to signals for which its program has set handlers.

    Schedulers send them to all processes of a job, and each would save a checkpoint. A handler of
    the worker keeps the default action, which ends a process, from taking their place.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, lambda *_: None)
    # If the training process ignores it, processes of hooks would vanish without an exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_with(descriptor: int) -> None:
    """Let the system kill this process when the other end of a socket closes.

    Even while it holds the interpreter lock in foreign code. The socket must carry no data.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block ^C and SIGTERM during a short step, and handle them right after it.

    So a process being started, or a descriptor being opened, is not lost before its owner knows of
    it. A process is born with both signals blocked, since a terminal sends it ^C as well, until it
    calls `leave_signals_to_parent`.
    """
    caught: list[tuple[Any, ...]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = []
    # Another thread may take a signal, but Python handles it in the main thread.
    if threading.current_thread() is threading.main_thread():
        set_handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
        handlers = [(number, handler) for number, handler in set_handlers if callable(handler)]
    try:
        # Signals are blocked last and unblocked first, while no handler raises: an exception in
        # between would leave them blocked.
        for number, _ in handlers:
            signal.signal(number, lambda *arguments: caught.append(arguments))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _set_all(handlers)
        for arguments in caught:
            dict(handlers)[arguments[0]](*arguments)


def _set_all(handlers: Sequence[tuple[signal.Signals, Any]]) -> None:
    """Set handlers of signals, even if one that is set raises at once."""
    if handlers:
        try:
            signal.signal(*handlers[0])
        finally:
            _set_all(handlers[1:])


_TICK_SECONDS = 0.02
_end_process = os._exit


@dataclass(frozen=True)
class Setup:
    """What a worker process needs to know, in the order in which it needs it."""

    name: str
    seed: int
    prefetch_factor: int
    shared_memory_bytes: int
    kept_heap_bytes: int
    working_directory: str
    sys_path: Sequence[str]
    sys_argv: Sequence[str]
    environment: dict[str, str]
    log_levels: dict[str, int]
    trace: HostTrace | None
    leases: int

    @classmethod
    def of_this_process(
        cls,
        options: LoaderOptions,
        *,
        name: str,
        seed: int,
        leases: int = LEASES,
        made: int = 0,
    ) -> Setup:
        """Return the settings that make a worker resemble this process and follow `options`.

        Args:
            options: How lanes are hosted.
            name: Name for messages.
            seed: Seed of the global random generators.
            leases: How many slots may be viewed.
            made: How many batches came from workers that this one replaces.
        """
        return cls(
            name=name,
            seed=seed,
            prefetch_factor=options.prefetch_factor,
            shared_memory_bytes=options.shared_memory_bytes,
            kept_heap_bytes=options.kept_heap_bytes,
            working_directory=os.getcwd(),
            sys_path=[entry or os.getcwd() for entry in sys.path],
            sys_argv=list(sys.argv),
            environment=dict(os.environ),
            log_levels=explicit_levels(),
            trace=None if options.trace is None else HostTrace(options, name, made=made),
            leases=leases,
        )

    def apply(self) -> None:
        """Make this process resemble the described one."""
        with contextlib.suppress(OSError):
            os.chdir(self.working_directory)
        sys.path[:] = self.sys_path
        sys.argv[:] = self.sys_argv
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        threading.current_thread().name = self.name
        keep_heap(self.kept_heap_bytes)


@dataclass(frozen=True)
class InheritedPipeline:
    """A pipeline that forks of the training process inherit.

    Args:
        pipeline: The pipeline.
        pool: The cache for cookers.
        is_shared: Whether processes read the batches that have not inherited it.
    """

    pipeline: Pipeline[Any]
    pool: CachePool | None
    is_shared: bool = False


def main(
    channel_descriptor: int,
    lifeline_descriptor: int,
    death_line_descriptor: int | None = None,
    *,
    parent: int | None = None,
    inherited: InheritedPipeline | None = None,
) -> int:
    """Work for the parent at the other end of both sockets; return the exit code.

    The lifeline closes when the parent closes it or ends. The worker sends its log records on it,
    and the parent a byte when it waits for events that are held back.

    Args:
        channel_descriptor: One of the sockets.
        lifeline_descriptor: The other one.
        death_line_descriptor: A socket that closes when the training process ends, for its forks.
        parent: Process id of the parent; None asks the system.
        inherited: The pipeline of a fork of the training process; None if it is sent.
    """
    if death_line_descriptor is not None:
        _leave_program(death_line_descriptor)
        if inherited is not None and not inherited.is_shared:
            send_as_inherited()  # other processes have classes of their own
    leave_signals_to_parent()
    # A hook ends the processes that it forks, such as those of a pool, with SIGTERM.
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    companion = _Companion(lifeline_descriptor, os.getppid() if parent is None else parent)
    companion.start()
    with socket.socket(fileno=channel_descriptor) as channel:
        channel.setblocking(True)
        with contextlib.suppress(_ParentLeft, BrokenPipeError, ConnectionResetError):
            worker = _Worker(channel, lifeline_descriptor, inherited)
            companion.outbox = worker.outbox
            worker.run()
    return 0


class _ParentLeft(Exception):
    """The parent has closed its end of the channel."""


class _Reopened(Exception):
    """The parent asks for other lanes."""


class _Worker:
    """One worker process."""

    def __init__(
        self, channel: socket.socket, lifeline: int, inherited: InheritedPipeline | None
    ) -> None:
        self._channel = channel
        self._inherited = inherited
        self._opening: Message | None = None
        self._idle_seconds = 0.0
        setup = self._receive()
        page, description, pipeline = setup.descriptors
        trace = os.dup(page)
        self._heartbeat = Heartbeat(map_shared(page))
        report_faults(trace)
        configuration: Setup = pickle.loads(read_shared(description))
        configuration.apply()
        records = socket.socket(fileno=os.dup(lifeline))
        LogSender(records, process_name=configuration.name).install(configuration.log_levels)
        self._slots = SlotPool(
            prefetch=configuration.prefetch_factor,
            max_bytes=configuration.shared_memory_bytes,
            leases=configuration.leases,
        )
        self.outbox = Outbox(
            channel, self._slots, wait=self._wait, poll=self._poll, hold=self._heartbeat.hold
        )
        self._pipeline_bytes = read_shared(pipeline)
        self._seed = configuration.seed
        self._trace = configuration.trace

    def run(self) -> None:
        """Serve one set of lanes after the other."""
        try:
            pipeline, self._pool = self._load()
        except BaseException as error:
            error.add_note("the pipeline cannot be loaded in a worker process")
            self._fail(error)
            return
        del self._pipeline_bytes, self._inherited
        seed_generators(self._seed)
        own_process()
        gc.freeze()
        while True:
            while self._opening is None:
                with contextlib.suppress(_Reopened):
                    self._wait()
            opening, self._opening = self._opening, None
            self.outbox.drop()
            self.outbox.generation = opening.generation
            with contextlib.suppress(_Reopened):
                self._serve(pipeline, pickle.loads(read_shared(opening.descriptors[0])))

    def _load(self) -> tuple[Any, CachePool | None]:
        """Return the pipeline and the pool."""
        if self._inherited is None:
            loaded: tuple[Any, CachePool | None] = pickle.loads(self._pipeline_bytes)
            return loaded
        return copy_for_worker((self._inherited.pipeline, self._inherited.pool))

    def _serve(self, pipeline: Any, opening: LanesToOpen) -> None:
        host = LaneHost(
            pipeline,
            opening.positions,
            lanes=opening.lanes,
            pool=self._pool,
            watch=self._heartbeat,
            trace=self._trace,
        )
        while (lane := host.lane) is not None:
            try:
                event = next(host)
            except BaseException as error:
                self._heartbeat.leave()
                self.outbox.put(Event(lane, error=error))
                break
            began, idle = perf_counter(), self._idle_seconds
            self.outbox.put(event)
            del event  # the next batch reuses its memory
            host.sent(began, self._idle_seconds - idle)
        self.outbox.flush()

    def _fail(self, error: BaseException) -> None:
        """Answer every request for lanes with `error`."""
        while True:
            with contextlib.suppress(_Reopened):
                self._wait()
            if self._opening is not None:
                opening, self._opening = self._opening, None
                order: LanesToOpen = pickle.loads(read_shared(opening.descriptors[0]))
                self.outbox.generation = opening.generation
                self.outbox.put(Event(min(order.positions), error=error))
                self.outbox.flush()

    def _receive(self) -> Message:
        began = perf_counter()
        message = receive(self._channel)
        self._idle_seconds += perf_counter() - began
        if message is None:
            raise _ParentLeft
        return message

    def _wait(self) -> None:
        """Read one message of the parent, waiting for it."""
        message = self._receive()
        if message.kind == MessageKind.FREE:
            self._slots.freed(message.slot)
        elif message.kind == MessageKind.LEASED:
            self._slots.leased(message.slot)
        elif message.kind == MessageKind.OPEN:
            self._opening = message
            raise _Reopened

    def _poll(self) -> None:
        """Read the messages that the parent has sent so far."""
        while is_readable(self._channel, 0):
            self._wait()


class _Companion(threading.Thread):
    """Does what cannot wait for user code to return.

    It ends this process soon after the parent is gone. A process forked by the parent may hold
    the other end of the lifeline and outlive the parent, so the parent is watched as well.
    """

    def __init__(self, lifeline: int, parent: int) -> None:
        super().__init__(name="companion", daemon=True)
        self.outbox: Outbox | None = None
        self._lifeline = lifeline
        self._parent = parent

    def run(self) -> None:
        while True:
            is_asked = is_readable(self._lifeline, _TICK_SECONDS)
            if os.getppid() != self._parent or (is_asked and not self._read()):
                break
            if self.outbox is not None:
                with contextlib.suppress(OSError):
                    self.outbox.flush_idle()
        time.sleep(GRACE_SECONDS)
        _end_process(0)

    def _read(self) -> bytes:
        """Return bytes of the parent, of which only the moment counts; b"" if it is gone."""
        try:
            return os.read(self._lifeline, 64)
        except OSError:
            return b""


def _leave_program(death_line: int) -> None:
    """Leave to the training process what this fork of it has inherited and must not use."""
    leave_handlers_to_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.dup2(null, sys.stdin.fileno())
    os.close(null)
    end_with(death_line)


def report_faults(descriptor: int) -> None:
    """Leave a traceback with the heartbeat after a fatal signal, or on SIGUSR1.

    It is the traceback of the thread that received the signal; the main thread, if the system can
    choose. Of all threads, the fault handler shows the newest hundred, and stores have as many.
    """
    seek_to_trace(descriptor)
    # If it is enabled already, enabling it leaves the handlers that a library has put in its place.
    faulthandler.disable()
    faulthandler.enable(descriptor, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=False)
    _report_exits(descriptor)


def _report_exits(descriptor: int) -> None:
    """Leave a traceback also where user code calls `os._exit` in this process."""
    process = os.getpid()

    def traced_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            faulthandler.dump_traceback(descriptor, all_threads=False)
        _end_process(status)

    os._exit = traced_exit


def seed_generators(seed: int) -> None:
    """Seed the global generators, which workers forked from one process would otherwise share."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
