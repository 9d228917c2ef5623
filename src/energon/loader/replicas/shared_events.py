"""Events that processes of a host share: written here for others, or viewed in their memory."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from functools import partial
from typing import Any

from energon.errors import WorkerTimeoutError
from energon.loader.lane_worker import Event, SharedEvent
from energon.loader.options import LoaderOptions, logger
from energon.loader.replicas.peer import Passed, Peer
from energon.loader.transport.outbox import EventWriter
from energon.loader.transport.received import read_event
from energon.loader.transport.slots import EventLayout, SharedMemory, Slot
from energon.loader.transport.wire import is_readable

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
        is_only: Whether no other process reads the same events.
    """

    def __init__(self, options: LoaderOptions, *, views: int, is_only: bool = False) -> None:
        self._options = options
        self._views = views
        self._is_only = is_only
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

    def read(self, passed: Passed, shared: SharedEvent) -> Event:
        """Rebuild an event."""
        key = passed.generation, passed.number
        content = shared.content
        if isinstance(content, bytes):
            self._returned.append(key)
            return read_event(memoryview(content), shared.layout, copied=True)
        view = content.view(is_only=self._is_only)
        is_copied = len(self._leases) >= self._views
        if not is_copied:
            ref = weakref.ref(view, partial(_note, self._returned, key))
            self._leases[key] = ref, shared
        event = read_event(view.data, shared.layout, copied=is_copied)
        if is_copied:
            self.stats["batches_copied"] += 1
            self._returned.append(key)
        return event

    def give_back(self, peer: Peer | None) -> None:
        """Tell a process which of its events are no longer viewed; None if they are of this one."""
        while self._returned:
            key = self._returned.popleft()
            self._leases.pop(key, None)
            if peer is not None:
                peer.release(*key)


def _note(returned: deque[tuple[int, int]], key: tuple[int, int], _: object) -> None:
    """Record that an event is no longer viewed; called in whichever thread drops it."""
    returned.append(key)
