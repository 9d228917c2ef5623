"""Events as they arrive from another process: rebuilt at once, or when their turn comes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from energon.loader.lane_worker import Event, SharedEvent
from energon.loader.transport.reports import RemoteError
from energon.loader.transport.slots import EventLayout

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
