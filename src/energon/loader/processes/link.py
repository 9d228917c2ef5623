"""Worker processes of this machine, as seen from the training process."""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import pickle
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from energon.errors import WorkerError
from energon.io.threads import fork_safe_rlock, library_is_used_here
from energon.loader.lane_worker import LanesToOpen, Pipeline, SharedEvent
from energon.loader.options import LoaderOptions, logger
from energon.loader.processes.main import InheritedPipeline, Setup, undisturbed
from energon.loader.processes.start import (
    ForkedProcess,
    ForkServerError,
    WorkerProcess,
    start_process,
    stop_fork_server,
)
from energon.loader.replaceable_worker import (
    Ending,
    ReplaceableWorker,
    StartError,
    describe_exit_code,
)
from energon.loader.transport.events import (
    ASK_SECONDS,
    Message,
    MessageKind,
    ReadEvent,
    RebuildClock,
    Received,
    TellsTime,
    UnreadEvent,
    is_readable,
    read_event,
    receive,
    send,
)
from energon.loader.transport.pickling import dump_pipeline, modules_named
from energon.loader.transport.reports import LogReceiver
from energon.loader.transport.slots import (
    LEASES,
    EventLayout,
    Heartbeat,
    SharedMemory,
    leases_of_rank,
    map_shared,
    read_table,
    share_bytes,
)
from energon.messages import warn_once
from energon.plan.randomness import derive_seed

PROCESS_CLOSE_SECONDS = 0.5
_TRACE_SECONDS = 0.5
_LOG_SECONDS = 0.1
"""How long log records of workers may wait while the trainer takes batches."""


class PickledPipeline(NamedTuple):
    """A pipeline on its way to processes that have nothing of this one."""

    method: Literal["forkserver", "spawn"]
    """How these start."""
    content: bytes
    modules: Sequence[str]
    """The modules that it names."""


class ProcessLink:
    """A worker process and everything shared with it.

    Args:
        rebuilt: Called with the times at which rebuilding events here began and ended.
        leases: How many slots may be viewed.
        is_shared: Whether other processes read the events, too.
    """

    def __init__(
        self,
        *,
        rebuilt: TellsTime | None = None,
        leases: int = LEASES,
        is_shared: bool = False,
    ) -> None:
        self._most_leases = leases
        self.rebuilding = RebuildClock(rebuilt)
        self.is_shared = is_shared
        _every_link.add(self)
        self._slots: dict[int, mmap.mmap] = {}
        self._memory: dict[int, SharedMemory] = {}
        self._leases: dict[int, weakref.ref[Any]] = {}
        self._returned: deque[int] = deque()
        self._generation = 0
        self._kill_at = 0.0
        self.num_copied = 0
        self._ours: list[socket.socket] = []
        self._theirs: list[socket.socket] = []
        self._death_line: socket.socket | None = None
        self._process: WorkerProcess | None = None

    def start(self, setup: Setup, pipeline: PickledPipeline | InheritedPipeline) -> None:
        """Start the process.

        Args:
            setup: How to set up the process.
            pipeline: The pipeline, pickled unless the process inherits it.

        Raises:
            WorkerError: If it cannot be started; nothing of it is left behind.
        """
        try:
            with _starting:
                self._start(pipeline)
            with undisturbed():
                page = Heartbeat.create()
                self.heartbeat = Heartbeat(map_shared(os.dup(page)))
                description = share_bytes(pickle.dumps(setup))
                pickled = pipeline.content if isinstance(pipeline, PickledPipeline) else b""
                self._send_attached(
                    Message(MessageKind.SETUP), page, description, share_bytes(pickled)
                )
        except BaseException:
            self.close()
            raise

    def _start(self, pipeline: PickledPipeline | InheritedPipeline) -> None:
        with undisturbed():
            self._channel, channel = socket.socketpair()
            self._lifeline, lifeline = socket.socketpair()
            self._death_line, death_line = socket.socketpair()
            self._ours = [self._channel, self._lifeline]
            self._theirs = [channel, lifeline, death_line]
            self._logs = LogReceiver(self._lifeline)
            _links.add(self)
        self._channel.setblocking(False)
        descriptors = [channel.fileno(), lifeline.fileno()]
        if isinstance(pipeline, InheritedPipeline):
            with undisturbed():
                self._process = ForkedProcess([*descriptors, death_line.fileno()], pipeline)
        else:
            # The fork server may take a while; it cleans up workers without a parent.
            with nullcontext() if pipeline.method == "forkserver" else undisturbed():
                self._process = start_process(
                    pipeline.method, descriptors, modules=pipeline.modules
                )
        for each in self._theirs:
            each.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def is_connected(self) -> bool:
        """Whether the worker has not yet been told to exit."""
        return self in _links

    def open(self, opening: LanesToOpen) -> None:
        """Let the worker host other lanes; events from earlier lanes are dropped from now on."""
        self._generation += 1
        data = pickle.dumps(opening)
        with undisturbed():
            self._send_attached(
                Message(MessageKind.OPEN, generation=self._generation), share_bytes(data)
            )

    def receive(self, timeout: float) -> Received | None:
        """Return the next events, [] if none come within `timeout` seconds, None after death."""
        self._give_back()
        self.tick()
        try:
            message = receive(self._channel)
        except BlockingIOError:
            return self._receive_later(timeout)
        except OSError:
            return None
        return None if message is None else self._read(message)

    def _receive_later(self, timeout: float) -> Received | None:
        """Wait for events, and return them."""
        try:
            if not self._wait(timeout):
                return []
            self.read_logs()
            return self.receive(0) if is_readable(self._channel, 0) else []
        except ValueError:
            check_not_exiting()  # which has closed this
            raise

    def _wait(self, timeout: float) -> bool:
        """Wait for events or log records, soon also for events that the worker holds back."""
        if is_readable(self._channel, min(timeout, ASK_SECONDS), self._lifeline):
            return True
        if self.heartbeat.holds:
            with contextlib.suppress(OSError):
                self._lifeline.send(b"?")
        return is_readable(self._channel, timeout, self._lifeline)

    @property
    def has_events(self) -> bool:
        """Whether events from the worker are waiting to be received."""
        try:
            return self.is_connected and is_readable(self._channel, 0)
        except (OSError, ValueError):  # another thread has just closed it
            return False

    def tick(self) -> None:
        """Pass on what the workers of all loaders have logged, unless that was done just now.

        It may be long until the trainer takes the next batch of a worker, such as one that
        validates.
        """
        global _read_logs_at
        now = time.monotonic()
        if now >= _read_logs_at:
            _read_logs_at = now + _LOG_SECONDS
            for link in list(_links):
                link.read_logs()

    @property
    def ending(self) -> Ending | None:
        """How the process ended; None while it runs."""
        code = self._exit_code()
        if code is None:
            return None
        check_not_exiting()
        return Ending(describe_exit_code(code), was_killed=code == -signal.SIGKILL)

    def _exit_code(self) -> int | None:
        return 0 if self._process is None else self._process.exit_code()

    def traceback(self) -> str:
        """Ask the running worker for its current position, whatever it is doing."""
        deadline = time.monotonic() + _TRACE_SECONDS
        self._signal(signal.SIGUSR1)
        before, text = "", self.heartbeat.traceback()
        while (not text or text != before) and time.monotonic() < deadline:
            time.sleep(0.01)
            before, text = text, self.heartbeat.traceback()
        return text

    def close(self) -> None:
        """End the process, by force if it does not exit at once. Views stay valid."""
        self.disconnect()
        while self._exit_code() is None and time.monotonic() < self._kill_at:
            time.sleep(0.002)
        self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self.disconnect()
        while self._exit_code() is None:
            self._signal(signal.SIGKILL)
            time.sleep(0.002)
        if self._death_line is not None:
            self._death_line.close()

    def disconnect(self) -> None:
        """Close this side's descriptors, which tells the worker to exit."""
        if self in _links:
            self.read_logs()
        self.leave()
        for each in self._theirs:
            each.close()

    def leave(self) -> None:
        """Close this side's descriptors without reading, which would steal data from the parent."""
        if self in _links:
            _links.discard(self)
            self._kill_at = time.monotonic() + PROCESS_CLOSE_SECONDS
        for each in self._ours:
            each.close()
        self._slots.clear()
        self._memory.clear()

    def forget(self) -> None:
        """Give up all that a fork has inherited of a worker of its parent."""
        self.leave()
        if self._death_line is not None:
            self._death_line.close()
        self._leases.clear()
        self._returned.clear()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def read_logs(self) -> None:
        """Pass on the log records that have arrived."""
        self._logs.drain()

    def _read(self, message: Message) -> Received:
        """Return the events in a slot, and tell the worker what happened to the slot."""
        if message.descriptors:
            if self.is_shared:
                descriptor = os.dup(message.descriptors[0])
                self._memory[message.slot] = SharedMemory(descriptor)
            self._slots[message.slot] = map_shared(message.descriptors[0])
        slot = message.slot
        if message.generation != self._generation:
            self._send(Message(MessageKind.FREE, slot))
            return []
        mapping = self._slots[slot]
        layouts = read_table(memoryview(mapping)[message.start : message.stop])
        if any(layout.buffers for layout in layouts):
            begun = time.perf_counter()
            events = self._rebuilt(slot, layouts)
            self.rebuilding.count(begun)
            return events
        data = memoryview(mapping[: message.start])
        self._send(Message(MessageKind.FREE, slot))
        return [UnreadEvent(self.rebuilding, data, layout, self.is_shared) for layout in layouts]

    def _rebuilt(self, slot: int, layouts: Sequence[EventLayout]) -> Received:
        """Return the events in a slot, which have arrays."""
        mapping = self._slots[slot]
        if len(self._leases) >= self._most_leases:
            self.num_copied += 1
            events = [read_event(memoryview(mapping), each, copied=True) for each in layouts]
            self._send(Message(MessageKind.FREE, slot))
            return events
        memory = self._memory.get(slot)
        lease = np.frombuffer(mapping, np.uint8) if memory is None else memory.view()
        self._leases[slot] = weakref.ref(lease, partial(_note, self._returned, slot))
        events = [read_event(lease.data, each, copied=False) for each in layouts]
        received: Received = events
        if memory is not None:
            received = [
                ReadEvent(event, SharedEvent(layout, memory, lease))
                for event, layout in zip(events, layouts, strict=True)
            ]
        del lease
        if slot in self._returned:
            # The contents of the slot were copied while the batch was rebuilt.
            self._give_back()
        else:
            self._send(Message(MessageKind.LEASED, slot))
        return received

    def _give_back(self) -> None:
        """Tell the worker which slots are no longer viewed."""
        while self._returned:
            slot = self._returned.popleft()
            self._leases.pop(slot, None)
            self._send(Message(MessageKind.FREE, slot))
            if (memory := self._memory.get(slot)) is not None:
                memory.reset()

    def _send_attached(self, message: Message, *descriptors: int) -> None:
        """Send `message` with these descriptors, and close them here."""
        self._send(message._replace(descriptors=descriptors))
        for descriptor in descriptors:
            os.close(descriptor)

    def _send(self, message: Message) -> None:
        # A worker that has died is noticed when it is waited for.
        with contextlib.suppress(OSError):
            send(self._channel, message)


_links: weakref.WeakSet[ProcessLink] = weakref.WeakSet()
"""Those whose workers have not been told to exit."""
_every_link: weakref.WeakSet[ProcessLink] = weakref.WeakSet()
_starting = fork_safe_rlock()
"""Held while a process starts: a fork made meanwhile would inherit the sockets of its worker."""
_read_logs_at = 0.0


def _note(returned: deque[int], slot: int, _: object) -> None:
    """Record that `slot` is no longer viewed; called in whichever thread drops the last view."""
    returned.append(slot)


def _leave_links() -> None:
    """Leave the workers to the parent, in a fork of this process."""
    for link in list(_every_link):
        link.forget()


_is_exiting = False


def check_not_exiting() -> None:
    """Raise WorkerError once the program is exiting, which ends all workers."""
    if _is_exiting:
        raise WorkerError(
            "the program is exiting, so its workers have ended while a thread still iterates over "
            "a loader; end the loop and join the thread first"
        ) from None


def _close_links() -> None:
    """End all workers, then the process that started them."""
    global _is_exiting
    _is_exiting = True
    links = list(_links)
    for link in links:
        link.disconnect()
    for link in links:
        link.close()
    stop_fork_server()


os.register_at_fork(after_in_child=_leave_links)
atexit.register(_close_links)


def make_process_workers(
    pipeline: Pipeline,
    options: LoaderOptions,
    *,
    names: Sequence[str],
    ranks: int = 1,
    rebuilt: TellsTime | None = None,
) -> list[ReplaceableWorker]:
    """Return a worker process for each of `names`; it starts when it gets lanes.

    Args:
        pipeline: The pipeline that the lanes run.
        options: How to host lanes.
        names: Names for messages.
        ranks: The number of ranks that share them.
        rebuilt: Called with the times at which rebuilding batches here began and ended.
    """
    is_shared = pipeline.worker_config.is_replicated or options.shared_workers is not None
    held = leases_of_rank(pipeline.worker_config) * ranks
    leases = max(LEASES, -(-held // len(names)))
    sent = _sent(pipeline, options, is_shared=is_shared)

    def start(name: str, made: int) -> ProcessLink:
        seed = derive_seed(pipeline.worker_config.seed_offset, "worker", name)
        setup = Setup.of_this_process(options, name=name, seed=seed, leases=leases, made=made)
        link = ProcessLink(rebuilt=rebuilt, leases=leases, is_shared=is_shared)
        try:
            link.start(setup, sent)
        except ForkServerError as error:
            check_not_exiting()
            raise StartError(str(error), was_killed=error.code == -signal.SIGKILL) from error
        return link

    return [
        ReplaceableWorker(pipeline, options, name=name, start=partial(start, name))
        for name in names
    ]


def _sent(
    pipeline: Pipeline, options: LoaderOptions, *, is_shared: bool
) -> PickledPipeline | InheritedPipeline:
    """Return the pipeline as workers get it, whose batches other processes may read."""
    method = options.start_method
    argument = getattr(pipeline, "start_method_argument", "start_method")
    advice = f"let them inherit it: {argument}='fork'"
    if method == "fork":
        if not library_is_used_here():
            return InheritedPipeline(pipeline, options.cache_pool, is_shared)
        method = "forkserver"
        advice = "start the workers before this process reads samples from an object store"
        warn_once(
            logger,
            "fork after reading",
            "this process has read samples from an object store, so it cannot be forked: the "
            "library that reads from stores has threads, which a fork lacks. Workers start from a "
            "fork server instead; they do not see what the program has set up since. Start them "
            "before reading samples in this process to have them forked, or pass "
            "%s='forkserver' to expect this",
            argument,
        )
    content = dump_pipeline((pipeline, options.cache_pool), advice=advice)
    return PickledPipeline(
        "spawn" if method == "spawn" else "forkserver", content, modules_named(content)
    )
