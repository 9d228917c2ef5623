"""Connections between the processes of a replica on one host, over which they pass on events.

An event in shared memory crosses as a descriptor of the memory, once, and the offsets in it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import struct
import tempfile
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from energon.errors import WorkerTimeoutError
from energon.loader.lane_worker import Event, SharedEvent
from energon.loader.options import LoaderOptions, logger
from energon.loader.transport.events import EventWriter, is_readable, read_event
from energon.loader.transport.slots import EventLayout, SharedMemory, Slot
from energon.worker import DataNeed, Replica, initialized_distributed

MEETING_SECONDS = 300.0
"""How long to wait at the start for the other processes of the host."""
SOCKET_BYTES = 1 << 20
"""Room in a socket for messages, of which the system may give less."""
MAX_SOCKET_FOLDER = 90
"""The path of a socket may have about a hundred characters."""

_OPENING, _WAITS = -1, -2
"""In place of a generation: lanes to open follow, and their length in place of a number; or the
process waits for the event with this number."""
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<q")


class Passed(NamedTuple):
    """An event on its way between processes of a replica.

    Args:
        generation: How often lanes had been opened before it; negative if it is no event.
        number: Its number since then.
        skip_rows: The rows that its lane skips because they killed workers.
        shared: The event.
        is_cut: Whether its batch has only the part of the context rank that receives it.
    """

    generation: int
    number: int
    skip_rows: tuple[int, ...]
    shared: SharedEvent | None
    is_cut: bool = False


class Peer:
    """Another process of the replica on this host."""

    def __init__(self, channel: socket.socket, *, rank: int, needs_data: DataNeed) -> None:
        self.channel = channel
        self.rank = rank
        self.needs_data = needs_data
        self.is_gone = False
        self.is_left_behind = False
        self.has_ended = False
        """Whether it sends nothing any more."""
        self.opening: Any = None
        """The lanes that it has asked for last, see `open`."""
        self.waits_for = -1
        """The number of the event that it had to wait for last."""
        self.behind: dict[tuple[int, int], SharedEvent | None] = {}
        """Events that it has not released, by generation and number; they keep their memory."""
        self._sent_memory: dict[int, weakref.ref[SharedMemory]] = {}
        self._memory: dict[int, SharedMemory] = {}
        self._received = bytearray()

    def send(self, passed: Passed) -> None:
        """Send an event.

        Raises:
            OSError: If the process is gone, or does not read.
        """
        descriptors: list[int] = []
        gone: list[int] = []
        shared = passed.shared
        if shared is not None and isinstance(memory := shared.content, SharedMemory):
            if memory.token not in self._sent_memory:
                gone = [token for token, ref in self._sent_memory.items() if ref() is None]
                for token in gone:
                    del self._sent_memory[token]
                self._sent_memory[memory.token] = weakref.ref(memory)
                descriptors = [memory.descriptor]
            passed = passed._replace(shared=SharedEvent(shared.layout, b"", memory.token))
        elif shared is not None:
            passed = passed._replace(shared=SharedEvent(shared.layout, shared.content))
        self.behind[passed.generation, passed.number] = shared
        data = pickle.dumps((tuple(passed), gone))
        message = _LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self.channel, [message], descriptors)
        if sent < len(message):  # else the process may have read it, and closed the socket
            self.channel.sendall(memoryview(message)[sent:])

    def receive(self) -> Passed | None:
        """Return the next event that the process has sent; None if it is gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self.channel, _LENGTH.size, 1)
            if len(head) < _LENGTH.size:
                return None
            data = _receive_all(self.channel, _LENGTH.unpack(head)[0])
        except OSError:
            return None
        if data is None:
            return None
        values, gone = pickle.loads(data)
        passed = Passed(*values)
        for token in gone:
            self._memory.pop(token, None)
        shared = passed.shared
        if shared is not None and shared.lease is not None:
            token = shared.lease
            if descriptors:
                self._memory[token] = SharedMemory(descriptors[0])
            shared = SharedEvent(shared.layout, self._memory[token])
            passed = passed._replace(shared=shared)
        return passed

    def release(self, generation: int, number: int) -> None:
        """Tell the process that an event is no longer viewed."""
        with contextlib.suppress(OSError):
            self.channel.sendall(_NUMBER.pack(generation) + _NUMBER.pack(number))

    def open(self, opening: object) -> None:
        """Ask the process for the events of some lanes.

        Raises:
            OSError: If it is gone.
        """
        data = pickle.dumps(opening)
        self.channel.sendall(_NUMBER.pack(_OPENING) + _NUMBER.pack(len(data)) + data)

    def wait_for(self, number: int) -> None:
        """Tell the process that this one waits for an event."""
        with contextlib.suppress(OSError):
            self.channel.sendall(_NUMBER.pack(_WAITS) + _NUMBER.pack(number))

    def read_messages(self) -> None:
        """Forget the events that the process has released, and note what it wants."""
        received = self._received
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self.channel.recv(1 << 16, socket.MSG_DONTWAIT):
                received += data
            self.has_ended = True
        start, head = 0, 2 * _NUMBER.size
        while len(received) >= start + head:
            generation, number = struct.unpack_from("<qq", received, start)
            start += head
            if generation == _WAITS:
                self.waits_for = number
            elif generation != _OPENING:
                self.behind.pop((generation, number), None)
            elif len(received) < start + number:
                start -= head
                break
            else:
                self.opening = pickle.loads(received[start : start + number])
                start += number
        del received[:start]

    def leave(self) -> None:
        """Drop the process, and all that is kept for it."""
        self.is_gone = True
        self.behind.clear()
        self._memory.clear()
        self.channel.close()


def meet_peers(replica: Replica) -> dict[int, Peer]:
    """Connect to the processes of a replica that are on this host; return them by position."""
    distributed = initialized_distributed("a replica")
    own, neighbors = replica.position, replica.neighbors
    folder = Path(tempfile.mkdtemp(prefix="energon-replica-"))
    if len(str(folder)) > MAX_SOCKET_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="energon-replica-", dir="/tmp"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            path = str(folder / "socket")
            listener.bind(path)
            listener.listen(len(neighbors))
            listener.settimeout(MEETING_SECONDS)
            paths: list[Any] = [None] * len(replica.members)
            distributed.all_gather_object(paths, path, group=replica.group)
            channels: dict[int, socket.socket] = {}
            for at in neighbors[: neighbors.index(own)]:
                channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                channel.connect(paths[at])
                channel.sendall(_NUMBER.pack(own))
                channels[at] = channel
            while len(channels) < len(neighbors) - 1:
                channel, _ = listener.accept()
                channel.setblocking(True)
                data = _receive_all(channel, _NUMBER.size) or b""
                channels[_NUMBER.unpack(data)[0]] = channel
            distributed.barrier(group=replica.group)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for channel in channels.values():
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return {
        at: Peer(
            channels[at],
            rank=replica.members[at].rank,
            needs_data=replica.members[at].needs_passed_on,
        )
        for at in sorted(channels)
    }


def _receive_all(channel: socket.socket, size: int) -> bytes | None:
    """Return the next bytes, `size` in all; None if the other side is gone."""
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


INLINE_BYTES = 2048
"""Events of up to this size travel in messages, of which `MAX_BEHIND` fit into a socket."""
PEER_POLL_SECONDS = 0.2


class EventSlots:
    """Slots of this process, each of which is free again when nothing refers to its event."""

    def __init__(self) -> None:
        self._writer = EventWriter()
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._memory: dict[int, SharedMemory] = {}

    def shared(self, event: Event, shared: SharedEvent | None) -> SharedEvent:
        """Return an event in a form of which any number can be sent without waiting.

        Args:
            event: The event.
            shared: The event as a worker wrote it; None if it was made in this process.
        """
        if shared is None:
            slot = self.take()
            return self.share(slot, self._writer.put(slot, event))
        if isinstance(shared.content, bytes) and len(shared.content) > INLINE_BYTES:
            slot = self.take()
            slot.write(shared.content)
            return self.share(slot, shared.layout)
        return shared

    def take(self) -> Slot:
        """Return an empty slot."""
        if not self._free:
            self._slots.append(Slot(len(self._slots)))
            self._free.append(self._slots[-1])
        slot = self._free.pop()
        slot.position = 0
        return slot

    def share(self, slot: Slot, layout: EventLayout) -> SharedEvent:
        """Return the event that was written to a slot."""
        lane, start, stop, buffers = layout
        if not buffers and stop - start <= INLINE_BYTES:
            self._free.append(slot)
            return SharedEvent(EventLayout(lane, 0, stop - start), bytes(slot.view[start:stop]))
        for descriptor in slot.announce():
            self._memory[slot.index] = SharedMemory(os.dup(descriptor))
        lease = _Lease()
        weakref.finalize(lease, self._free.append, slot)
        return SharedEvent(layout, self._memory[slot.index], lease)


class _Lease:
    """Keeps a slot while it exists."""

    __slots__ = ("__weakref__",)


class EventReader:
    """Reads the events that another process passes on, as views of its memory.

    Args:
        options: How long to wait for an event.
        views: How many may be viewed; further ones are copied.
    """

    def __init__(self, options: LoaderOptions, *, views: int) -> None:
        self._options = options
        self._views = views
        self._leases: dict[tuple[int, int], tuple[weakref.ref[Any], SharedEvent]] = {}
        self._returned: deque[tuple[int, int]] = deque()
        self.stats = {"worker_deaths": 0, "worker_timeouts": 0, "batches_copied": 0}

    def receive(self, peer: Peer, *, is_first: bool) -> Passed | None:
        """Return the next event of a process; None if it is gone.

        Raises:
            WorkerTimeoutError: If it takes too long, and the user wants that to be an error.
        """
        self.give_back(peer)
        limit = self._options.watchdog_timeout_seconds
        if is_first:
            limit = self._options.watchdog_initial_timeout_seconds
        deadline = None if limit is None else time.monotonic() + limit
        while not is_readable(peer.channel, PEER_POLL_SECONDS):
            if deadline is not None and time.monotonic() > deadline:
                self.stats["worker_timeouts"] += 1
                text = (
                    f"rank {peer.rank}, which loads for this one, has passed on no batch for "
                    f"{limit:g} s"
                )
                if self._options.fail_on_timeout:
                    raise WorkerTimeoutError(text)
                logger.warning("%s; still waiting", text)
                deadline = None
        return peer.receive()

    def read(self, passed: Passed, shared: SharedEvent) -> tuple[Event, SharedEvent | None]:
        """Rebuild an event; return it also as others can read it, unless it had to be copied."""
        key = passed.generation, passed.number
        content = shared.content
        if isinstance(content, bytes):
            self._returned.append(key)
            return read_event(memoryview(content), shared.layout, copied=True), shared
        view = content.view()
        if len(self._leases) >= self._views:
            self.stats["batches_copied"] += 1
            self._returned.append(key)
            return read_event(view.data, shared.layout, copied=True), None
        ref = weakref.ref(view, partial(_note, self._returned, key))
        self._leases[key] = ref, shared  # whose slot may be one of this process
        event = read_event(view.data, shared.layout, copied=False)
        return event, shared._replace(lease=view)

    def give_back(self, peer: Peer | None) -> None:
        """Tell a process which of its events are no longer viewed; None if they are of this one."""
        while self._returned:
            key = self._returned.popleft()
            if peer is not None:
                peer.release(*key)
            _, shared = self._leases.pop(key, (None, None))
            if shared is not None and isinstance(shared.content, SharedMemory):
                shared.content.reset()


def _note(returned: deque[tuple[int, int]], key: tuple[int, int], _: object) -> None:
    """Record that an event is no longer viewed; called in whichever thread drops it."""
    returned.append(key)
