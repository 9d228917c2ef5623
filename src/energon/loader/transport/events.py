"""Send events to the parent: pickled straight into shared memory, small ones together.

There, they are rebuilt at once, or when their turn comes. The messages between parent and worker
all have one length, with file descriptors attached; anything longer travels in shared memory, so
neither side ever waits for the other to read.
"""

from __future__ import annotations

import enum
import io
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple, Protocol

from energon.loader.lane_worker import Event, SharedEvent
from energon.loader.transport.pickling import BatchPickler, find_unpicklable
from energon.loader.transport.reports import RemoteError
from energon.loader.transport.slots import ALIGNMENT, EventLayout, EventTable, Slot, SlotPool

_LAYOUT = struct.Struct("<IIQQQ")
_MAX_DESCRIPTORS = 4


class MessageKind(enum.IntEnum):
    """What a message says, and who sends it."""

    SETUP = 1
    """Parent: attached are the heartbeat page and what `processes.main.Setup` describes."""
    OPEN = 2
    """Parent: host the lanes described in the attachment; `generation` numbers this request."""
    FREE = 3
    """Parent: slot `slot` may be overwritten."""
    LEASED = 4
    """Parent: the content of `slot` has been received, but views of it are in use."""
    EVENTS = 5
    """Worker: `slot` holds events; their table occupies its bytes `start` to `stop`. A slot that is
    new or has grown is attached."""


class Message(NamedTuple):
    """One message; fields that do not apply are 0."""

    kind: int
    slot: int = 0
    generation: int = 0
    start: int = 0
    stop: int = 0
    descriptors: Sequence[int] = ()


def is_readable(
    channel: socket.socket | int, timeout_seconds: float, *others: socket.socket
) -> bool:
    """Return whether any of them has something to read, waiting for it up to a timeout.

    Unlike `select.select`, this works for descriptors with any number.
    """
    poll = select.poll()
    for each in (channel, *others):
        poll.register(each, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def send(channel: socket.socket, message: Message) -> None:
    """Send `message`; attached descriptors stay open here.

    Raises:
        OSError: If the other side is gone.
    """
    *fields, descriptors = message
    data = _LAYOUT.pack(*fields)
    if descriptors:
        socket.send_fds(channel, [data], list(descriptors))
    else:
        channel.sendall(data)


def receive(channel: socket.socket) -> Message | None:
    """Return the next message, or None if the other side is gone.

    Raises:
        BlockingIOError: If there is none yet and `channel` does not block.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _LAYOUT.size, _MAX_DESCRIPTORS)
    except ConnectionError:
        return None
    # Messages are far shorter than what a Unix socket sends as a whole: a partial one means that
    # the sender died.
    if len(data) < _LAYOUT.size:
        return None
    kind, slot, generation, start, stop = _LAYOUT.unpack(data)
    return Message(kind, slot, generation, start, stop, descriptors)


BUNDLE_BYTES = 1 << 18
BUNDLE_EVENTS = 64
BUNDLE_SECONDS = 0.001
OUTBOX_POLL_SECONDS = 0.001
FEW_EVENTS = 32
HELD_SECONDS = 0.004
ASK_SECONDS = 0.006
"""Waking the parent costs as much as several small samples. So small events wait for each other
while it is busy, and for a few more and a few milliseconds even while it waits, as long as they
arrive quickly. A parent that has waited for longer asks for those held back. That costs more: the
thread that answers takes the GIL from the one that makes samples."""
LARGE_PICKLE = 1 << 20
"""A pickler keeps a table of the size that its largest pickle needed, and clears all of it each
time: after a million strings, 1.6 ms a batch. One that has written so much is replaced."""


class EventSink(Protocol):
    """Where events are written, such as a slot."""

    position: int

    def write(self, data: object) -> int:
        """Append the bytes of `data`, and return their number."""

    def write_buffer(self, buffer: PickleBuffer) -> tuple[int, int]:
        """Take a buffer of a pickle, and return where it begins and ends."""


class EventWriter:
    """Writes events to slots or other sinks."""

    def __init__(self) -> None:
        self._pickler = BatchPickler(self)
        self._slot: EventSink = Slot(0)

    def write(self, data: Any) -> int:
        """Accept bytes of a pickle; called by the pickler."""
        return self._slot.write(data)

    def put(self, slot: EventSink, event: Event) -> EventLayout:
        """Append `event` to a slot; if it cannot be pickled, append an event with that error."""
        self._slot, mark = slot, slot.position
        try:
            return self._put(_portable(event))
        except Exception as error:
            slot.position = mark
            name = find_unpicklable(event.batch, _pickled)
            error.add_note(
                f"batch of lane {event.lane} cannot be sent to the training process because of "
                f"{name}; make it picklable, leave it out, or use workers='thread'"
            )
            return self._put(_portable(Event(event.lane, error=error)))

    def _put(self, value: tuple[Any, ...]) -> EventLayout:
        """Write the pickle of `value` and its buffers."""
        slot = self._slot
        start = slot.position
        self._pickler.dump(value)
        stop = slot.position
        buffers = [slot.write_buffer(buffer) for buffer in self._pickler.buffers]
        if stop - start < LARGE_PICKLE:
            self._pickler.release()
        else:
            self._pickler = BatchPickler(self)
        return EventLayout(value[0], start, stop, buffers)


class Outbox:
    """Sends events from a worker to its parent process.

    One thread puts events; another one calls `flush_idle` when the parent asks for it, and now and
    then, so that events held back do not wait for a slow sample.

    Args:
        channel: Socket to the parent.
        slots: Shared memory to write to.
        wait: Reads at least one message from the parent.
        poll: Reads the messages that the parent has sent so far.
        hold: Called with whether events are held back.
    """

    def __init__(
        self,
        channel: socket.socket,
        slots: SlotPool,
        *,
        wait: Callable[[], None],
        poll: Callable[[], None],
        hold: Callable[[bool], None],
    ) -> None:
        self._channel = channel
        self._slots = slots
        self._wait = wait
        self._poll = poll
        self._hold = hold
        self._writer = EventWriter()
        self._lock = threading.Lock()
        self._slot: Slot | None = None
        self._table = EventTable()
        self._last_put = 0.0
        self._held_since = 0.0
        self._last_poll = 0.0
        self.generation = 0

    def put(self, event: Event) -> None:
        """Send `event`, or hold it back until there are more."""
        with self._lock:
            self._put(event)

    def flush(self) -> None:
        """Send the events held back."""
        with self._lock:
            self._flush()

    def flush_idle(self) -> None:
        """Send the events held back unless one is being added; called by another thread."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._lock.release()

    def drop(self) -> None:
        """Drop the events held back."""
        with self._lock:
            if self._slot is not None:
                self._slots.put_back(self._slot)
                self._forget()

    def _put(self, event: Event) -> None:
        if self._slot is None:
            self._slot = self._slots.take(self._wait)
        slot = self._slot
        self._table.append(self._writer.put(slot, event))
        if self._may_wait(slot):
            self._hold(True)
        else:
            self._flush()

    def _flush(self) -> None:
        slot = self._slot
        if slot is None or not len(self._table):
            return
        slot.align(ALIGNMENT)
        start = slot.position
        slot.write(self._table.to_bytes())
        message = Message(
            MessageKind.EVENTS, slot.index, self.generation, start, slot.position, slot.announce()
        )
        send(self._channel, message)
        self._slots.sent(slot)
        self._forget()

    def _forget(self) -> None:
        self._slot = None
        self._table.clear()
        self._hold(False)

    def _may_wait(self, slot: Slot) -> bool:
        now = time.monotonic()
        is_quick = now - self._last_put < BUNDLE_SECONDS
        self._last_put = now
        if len(self._table) == 1:
            self._held_since = now
        if not is_quick or slot.position >= BUNDLE_BYTES or len(self._table) >= BUNDLE_EVENTS:
            return False
        if now - self._last_poll > OUTBOX_POLL_SECONDS:
            self._last_poll = now
            self._poll()
        is_early = len(self._table) < FEW_EVENTS and now - self._held_since < HELD_SECONDS
        return is_early or self._slots.num_sent > 0


def _pickled(value: Any) -> None:
    BatchPickler(io.BytesIO()).dump(value)


def _portable(event: Event) -> tuple[Any, ...]:
    """Return `event` in the form that is pickled."""
    *rest, error = event
    return (*rest, None if error is None else RemoteError.of(error))


TellsTime = Callable[[float, float], None]
"""Called with the times at which something began and ended, by `time.perf_counter`."""


class RebuildClock:
    """Measures how long events of a worker take to be rebuilt.

    Args:
        rebuilt: Called with the times at which that began and ended each time.
    """

    def __init__(self, rebuilt: TellsTime | None = None) -> None:
        self._rebuilt_at = rebuilt
        self.seconds = 0.0

    def count(self, begun: float) -> None:
        """Count the time since then as time to rebuild events."""
        ended = time.perf_counter()
        self.seconds += ended - begun
        if self._rebuilt_at is not None:
            self._rebuilt_at(begun, ended)


class UnreadEvent(NamedTuple):
    """An event as it was sent, which is rebuilt only when its turn comes.

    So the objects of a batch are still in the processor cache when the trainer uses it, and take
    the memory of the batch before it. Rebuilding all batches of a message at once takes twice the
    time.
    """

    clock: RebuildClock
    data: memoryview
    layout: EventLayout
    is_shared: bool = False

    def read(self) -> Event:
        """Rebuild the event."""
        begun = time.perf_counter()
        event = read_event(self.data, self.layout, copied=False)
        self.clock.count(begun)
        return event

    @property
    def shared(self) -> SharedEvent | None:
        """The event as other processes can read it."""
        if not self.is_shared:
            return None
        lane, start, stop, _ = self.layout
        return SharedEvent(EventLayout(lane, 0, stop - start), bytes(self.data[start:stop]))


class ReadEvent(NamedTuple):
    """An event that was rebuilt over shared memory, and that other processes can read there."""

    event: Event
    shared: SharedEvent

    def read(self) -> Event:
        """Return the event."""
        return self.event


Received = Sequence[Event | UnreadEvent | ReadEvent]


def read_event(view: memoryview, layout: EventLayout, *, copied: bool) -> Event:
    """Return the event at `layout`, whose arrays are views of `view` unless they are copied."""
    buffers: list[Any] = [view[start:stop] for start, stop in layout.buffers]
    if copied:
        buffers = [bytearray(each) for each in buffers]
    return rebuild_event(layout.lane, view[layout.start : layout.stop], buffers)


def rebuild_event(lane: int, pickled: memoryview, buffers: Sequence[Any]) -> Event:
    """Return an event of a lane from its pickle and its buffers."""
    try:
        event = Event(*pickle.loads(pickled, buffers=buffers))
    except Exception as failure:
        failure.add_note(f"a batch of lane {lane} cannot be rebuilt in this process")
        return Event(lane, error=failure)
    remote: Any = event.error
    return event._replace(error=remote.rebuild()) if isinstance(remote, RemoteError) else event
