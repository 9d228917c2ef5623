"""Send events to the parent: pickled straight into shared memory, small ones together.

Lists of raw samples are sent by column. A batch of undecoded samples is a list of dicts with the
same names. Pickled dict by dict it costs more than reading it did: a call for each dict, and a
copy of every part into the pickle. By column, large parts go straight into shared memory, and the
dicts are made again by one comprehension on the other side.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, NamedTuple

from energon.errors import WorkerError
from energon.loader.hosting import Event
from energon.loader.transport.pickling import BatchPickler
from energon.loader.transport.reports import RemoteError
from energon.loader.transport.slots import EventLayout, EventTable, Slot, SlotPool
from energon.loader.transport.wire import Message, MessageKind, send
from energon.samples.crude import CrudeSample, SampleSource, known_sources

OUT_OF_BAND_BYTES = 4096
"""Parts of this size and more are copied once, into shared memory."""


_OF_SOURCES = ("__key__", "__restore_key__", "__shard__")


class Columns:
    """A list of samples on its way to another process, where it is a list again."""

    __slots__ = ("columns", "names")

    def __init__(self, names: tuple[str, ...], columns: list[Sequence[Any]]) -> None:
        self.names = names
        self.columns = columns

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        lifted = tuple(at for at, column in enumerate(self.columns) if _is_large(column))
        columns = list(self.columns)
        for at in lifted:
            columns[at] = [_lift(value) for value in columns[at]]
        return rebuild, (self.names, lifted, columns)


def by_column(batch: Any) -> Any:
    """Return a list of crude samples with the same names as columns, anything else as it is."""
    if type(batch) is not list or not batch:
        return batch
    # Plain dicts are left alone: pickle itself is fast with those.
    if type(batch[0]) is not CrudeSample or not batch[0]:
        return batch
    names = tuple(batch[0])
    # Names in the same order, as one reader yields them.
    if set(map(type, batch)) != {CrudeSample} or set(map(tuple, batch)) != {names}:
        return batch
    if set(map(type, names)) != {str}:
        return batch
    columns: list[Any] = list(zip(*[sample.values() for sample in batch], strict=True))
    if "__sources__" in names and set(_OF_SOURCES) <= set(names):
        at = names.index("__sources__")
        columns[at] = _shared_source(batch, columns[at]) or columns[at]
    return Columns(names, columns)


class SharedSource(NamedTuple):
    """Stands for a column of sources: all samples are of one dataset and have the same parts."""

    dataset_path: str
    parts: tuple[str, ...]


def _shared_source(batch: list[Any], column: Sequence[Any]) -> SharedSource | None:
    """Return what the sources of samples share, if the rest of each follows from its sample."""
    found = set()
    for sample, sources in zip(batch, column, strict=True):
        if type(sources) is not tuple or len(sources) != 1 or type(sources[0]) is not SampleSource:
            return None
        found.add(sources[0].follows_from(sample))
    (first, *others) = found
    return None if others or first is None else SharedSource(*first)


def rebuild(
    names: tuple[str, ...], lifted: Sequence[int], columns: list[Sequence[Any]]
) -> list[CrudeSample]:
    """Return the list that was sent."""
    for at in lifted:
        # Out of the pickle they are views of shared memory.
        columns[at] = [bytes(v) if type(v) is memoryview else v for v in columns[at]]
    for at, column in enumerate(columns):
        if type(column) is SharedSource:
            path, parts = column
            known = [columns[names.index(name)] for name in _OF_SOURCES]
            columns[at] = known_sources(path, known, parts)
    return _row_builder(names)(*columns)


def _is_large(column: Sequence[Any]) -> bool:
    if type(column) is SharedSource:
        return False
    if type(column[0]) is not bytes:
        return False
    return any(type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES for value in column)


def _lift(value: Any) -> Any:
    large = type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES
    return PickleBuffer(value) if large else value


@lru_cache(maxsize=1024)
def _row_builder(names: tuple[str, ...]) -> Callable[..., list[CrudeSample]]:
    """Compile a function of columns that returns a dict per row.

    Names come from data, so they appear in the source as string literals only.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    entries = ", ".join(f"{name!r}: v{index}" for index, name in enumerate(names))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    source = f"lambda {columns}: [CrudeSample({{{entries}}}) for {values}, in zip({columns})]"
    builder: Callable[..., list[CrudeSample]] = eval(source, {"CrudeSample": CrudeSample})
    return builder


ALIGNMENT = 64
BUNDLE_BYTES = 1 << 18
BUNDLE_EVENTS = 64
BUNDLE_SECONDS = 0.001
POLL_SECONDS = 0.0002
"""Waking the parent costs as much as a hundred small samples. So while it has something to do,
small events wait for each other, as long as they come quickly."""


class Outbox:
    """The way from worker to parent.

    One thread puts events; another one calls `flush_idle` now and then, so that what is kept
    does not wait for a sample that takes long.

    Args:
        channel: Socket to the parent.
        slots: Shared memory to write to.
        wait: Reads at least one message of the parent.
        poll: Reads the messages of the parent that have come, if any.
    """

    def __init__(
        self,
        channel: socket.socket,
        slots: SlotPool,
        *,
        wait: Callable[[], None],
        poll: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._slots = slots
        self._wait = wait
        self._poll = poll
        self._pickler = BatchPickler(self)
        self._lock = threading.Lock()
        self._slot: Slot | None = None
        self._table = EventTable()
        self._last_put = 0.0
        self._last_poll = 0.0
        self.generation = 0

    def write(self, data: Any) -> int:
        """Take bytes of a pickle; called by the pickler."""
        slot = self._slot
        if slot is None:
            raise WorkerError("a pickle was written without a slot; this is a defect of energon")
        return slot.write(data)

    def put(self, event: Event) -> None:
        """Send `event`, or keep it until more are together."""
        with self._lock:
            self._put(event)

    def flush(self) -> None:
        """Send what is kept."""
        with self._lock:
            self._flush()

    def flush_idle(self) -> None:
        """Send what is kept if nothing is being added; called by another thread."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._lock.release()

    def drop(self) -> None:
        """Forget what is kept."""
        with self._lock:
            if self._slot is not None:
                self._slots.put_back(self._slot)
                self._forget()

    def _put(self, event: Event) -> None:
        if self._slot is None:
            self._slot = self._slots.take(self._wait)
        slot = self._slot
        mark = slot.position
        try:
            self._append(slot, _portable(event))
        except Exception as error:
            slot.position = mark
            error.add_note(f"batch of lane {event.lane} cannot be sent to the training process")
            self._append(slot, _portable(Event(event.lane, error=error)))
        if not self._may_wait(slot):
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

    def _append(self, slot: Slot, value: tuple[Any, ...]) -> None:
        """Write the pickle of `value` and its buffers, and note where they are."""
        start = slot.position
        self._pickler.dump(value)
        stop = slot.position
        buffers = [_write_buffer(slot, buffer) for buffer in self._pickler.buffers]
        self._pickler.buffers.clear()
        self._table.append(EventLayout(value[0], start, stop, buffers))

    def _may_wait(self, slot: Slot) -> bool:
        now = time.monotonic()
        is_quick = now - self._last_put < BUNDLE_SECONDS
        self._last_put = now
        if not is_quick or slot.position >= BUNDLE_BYTES or len(self._table) >= BUNDLE_EVENTS:
            return False
        if now - self._last_poll > POLL_SECONDS:
            self._last_poll = now
            self._poll()
        return self._slots.num_sent > 0


def _write_buffer(slot: Slot, buffer: PickleBuffer) -> tuple[int, int]:
    slot.align(ALIGNMENT)
    start = slot.position
    slot.write(buffer.raw())
    return start, slot.position


def _portable(event: Event) -> tuple[Any, ...]:
    """Return `event` as what is pickled."""
    lane, batch, *rest, error = event
    return (lane, by_column(batch), *rest, None if error is None else RemoteError.of(error))
