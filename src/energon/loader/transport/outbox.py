"""Send events to the parent: pickled straight into shared memory, small ones together.

Lists of raw samples are sent by column. A batch of undecoded samples is a list of dicts with the
same names. Pickling it dict by dict would cost more than reading it did: a call for each dict, and
a copy of every part into the pickle. By column, large parts go straight into shared memory, and one
comprehension on the other side makes the dicts again.
"""

from __future__ import annotations

import copyreg
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, repeat
from keyword import iskeyword
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np

from energon.errors import WorkerError
from energon.loader.hosting import Event
from energon.loader.transport.pickling import BatchPickler, is_copy
from energon.loader.transport.reports import RemoteError
from energon.loader.transport.slots import EventLayout, EventTable, Slot, SlotPool
from energon.loader.transport.wire import Message, MessageKind, send
from energon.samples.crude import CrudeSample, SampleSource, known_sources

OUT_OF_BAND_BYTES = 4096
"""Parts of at least this size are copied once, into shared memory."""


_NOTES = ("__key__", "__shard__", "__restore_key__", "__subflavors__", "__sources__")
_LEAVES = {str, bytes, int, float, bool, type(None), np.ndarray}
"""Types of attributes in objects that are sent by column: nothing that holds other samples."""


class Columns:
    """A list of samples on its way to another process, where it becomes a list again.

    Args:
        kind: The type of the samples.
        names: The names of the columns.
        columns: For each name, the values of all samples.
    """

    __slots__ = ("columns", "kind", "names")

    def __init__(self, kind: type, names: tuple[str, ...], columns: list[Any]) -> None:
        self.kind = kind
        self.names = names
        self.columns = columns

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        columns, names = list(self.columns), self.names
        if "__sources__" in names:
            at = names.index("__sources__")
            columns[at] = _shared_sources(names, columns, columns[at]) or columns[at]
        lifted = tuple(at for at, column in enumerate(columns) if _is_large(column))
        for at in lifted:
            columns[at] = [_lift(value) for value in columns[at]]
        return rebuild, (self.kind, names, lifted, columns)


def by_column(batch: Any) -> Any:
    """Return a list of samples of the same kind with the same names as columns.

    Anything else is returned unchanged, including plain dicts, since pickle is fast with those.
    """
    if type(batch) is not list or not batch:
        return batch
    kind = type(batch[0])
    if set(map(type, batch)) != {kind}:
        return batch
    if kind is not CrudeSample:
        return _objects_by_column(kind, batch) or batch
    names = _common_names(batch)
    if not names:
        return batch
    return Columns(kind, names, list(zip(*map(dict.values, batch), strict=True)))


def _objects_by_column(kind: type, batch: list[Any]) -> Columns | None:
    """Return objects with the same attributes as columns; None if they hold anything more."""
    slots = _slots_of(kind)
    if slots is None:
        return None
    names, columns = slots, [_filled(batch, slot) for slot in slots]
    held: list[Any] = list(map(vars, batch)) if kind.__dictoffset__ else []
    if any(held):
        names += _common_names(held)
        columns += zip(*map(dict.values, held), strict=False)
        if len(names) == len(slots) or _has_setters(kind, names[len(slots) :]):
            return None
    kinds = {each for name, c in zip(names, columns, strict=True) for each in _kinds(name, c)}
    return Columns(kind, names, columns) if kinds and kinds <= _LEAVES else None


def _common_names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the names of dicts that have the same names in the same order; None otherwise."""
    names = tuple(rows[0])
    same = list(chain.from_iterable(rows)) == list(names) * len(rows)
    # Equal numbers of names in all, one after another, may still be cut elsewhere.
    alike = same and set(map(len, rows)) == {len(names)} and set(map(type, names)) == {str}
    return names if alike else ()


@lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...] | None:
    """Return the slots of a class if pickle would copy nothing but its attributes; else None."""
    own: tuple[Any, ...] = (kind.__new__, kind.__reduce_ex__, kind.__reduce__)
    plain: tuple[Any, ...] = (object.__new__, object.__reduce_ex__, object.__reduce__)
    special = ("__setstate__", "__getnewargs__", "__getnewargs_ex__")
    copies_state = getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
    if own != plain or not copies_state or any(hasattr(kind, name) for name in special):
        return None
    if kind in copyreg.dispatch_table or is_copy(kind):
        return None
    return tuple(copyreg._slotnames(kind))  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _has_setters(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether setting one of these attributes does more than store a value."""
    return any(hasattr(getattr(kind, name, None), "__set__") for name in names)


def _filled(batch: list[Any], slot: str) -> tuple[Any, ...]:
    """Return the values in a slot of objects; a marker that is never sent where it is empty."""
    try:
        return tuple(map(attrgetter(slot), batch))
    except AttributeError:
        return (_EMPTY,)


_EMPTY = object()


def _kinds(name: str, column: Sequence[Any]) -> set[type]:
    """Return the types of values in a column; those of notes are known."""
    if name in _NOTES and column[0] is not _EMPTY:
        return {str}
    kinds: set[type] = set(map(type, column))
    if np.ndarray in kinds and any(type(v) is np.ndarray and v.dtype.hasobject for v in column):
        kinds.add(object)
    return kinds


class SharedSources(NamedTuple):
    """Stands for a column of sources, each of which belongs to a single sample.

    For each property of a source, in the order of `known_source`, it has the name of the column
    with the value, or else its own column, of one value if all samples share it.
    """

    num_samples: int
    columns: tuple[Any, ...]


_SOURCE_NAMES = (None, "__key__", "__restore_key__", "__shard__", None)


def _shared_sources(
    names: tuple[str, ...], columns: list[Any], column: Sequence[Any]
) -> SharedSources | None:
    """Return what the sources of samples tell that the samples do not."""
    if set(map(type, column)) != {tuple} or set(map(len, column)) != {1}:
        return None
    sources = list(chain.from_iterable(column))
    if set(map(type, sources)) != {SampleSource}:
        return None
    known = list(zip(*map(attrgetter("_known"), sources), strict=True))
    for at, name in enumerate(_SOURCE_NAMES):
        if name in names and known[at] == tuple(columns[names.index(name)]):
            known[at] = name  # type: ignore[call-overload]
        elif known[at].count(known[at][0]) == len(column):
            known[at] = known[at][:1]
    return SharedSources(len(column), tuple(known))


def rebuild(
    kind: Any, names: tuple[str, ...], lifted: Sequence[int], columns: list[Sequence[Any]]
) -> list[Any]:
    """Return the list that was sent."""
    for at in lifted:
        # As unpickled, they are views of shared memory.
        columns[at] = [bytes(v) if type(v) is memoryview else v for v in columns[at]]
    for at, column in enumerate(columns):
        if type(column) is SharedSources:
            known = [columns[names.index(c)] if type(c) is str else c for c in column.columns]
            columns[at] = known_sources(known, column.num_samples)
    if kind is CrudeSample:
        return _row_builder(names)(*columns)
    if kind.__setattr__ is object.__setattr__ and all(map(_is_attribute, names)):
        return _object_builder(names)(kind, *columns)
    made: list[Any] = list(map(object.__new__, repeat(kind, len(columns[0]))))
    for name, column in zip(names, columns, strict=True):
        deque(map(object.__setattr__, made, repeat(name), column), maxlen=0)
    return made


def _is_large(column: Sequence[Any]) -> bool:
    if type(column) is SharedSources or type(column[0]) is not bytes:
        return False
    if set(map(type, column)) == {bytes}:
        return max(map(len, column)) >= OUT_OF_BAND_BYTES
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


def _is_attribute(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


@lru_cache(maxsize=1024)
def _object_builder(names: tuple[str, ...]) -> Callable[..., list[Any]]:
    """Compile a function of a class and columns that returns an object per row.

    It takes a quarter of the time of `setattr`.
    """
    values = ", ".join(f"v{index}" for index in range(len(names)))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    stores = "; ".join(f"each.{name} = v{index}" for index, name in enumerate(names))
    source = (
        f"def build(kind, {columns}):\n"
        "    made = []\n"
        f"    for {values}, in zip({columns}):\n"
        f"        each = new(kind); {stores}; made.append(each)\n"
        "    return made\n"
    )
    scope: dict[str, Any] = {"new": object.__new__}
    exec(source, scope)
    builder: Callable[..., list[Any]] = scope["build"]
    return builder


ALIGNMENT = 64
BUNDLE_BYTES = 1 << 18
BUNDLE_EVENTS = 64
BUNDLE_SECONDS = 0.001
POLL_SECONDS = 0.0002
"""Waking the parent costs as much as a hundred small samples. So while it is busy, small events
wait for each other, as long as they arrive quickly."""


class Outbox:
    """The way from worker to parent.

    One thread puts events; another one calls `flush_idle` now and then, so that events held back do
    not wait for a slow sample.

    Args:
        channel: Socket to the parent.
        slots: Shared memory to write to.
        wait: Reads at least one message from the parent.
        poll: Reads the messages that the parent has sent so far.
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
        """Accept bytes of a pickle; called by the pickler."""
        slot = self._slot
        if slot is None:
            raise WorkerError("a pickle was written without a slot; please report this energon bug")
        return slot.write(data)

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
        """Write the pickle of `value` and its buffers, and record where they are."""
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
    """Return `event` in the form that is pickled."""
    lane, batch, *rest, error = event
    return (lane, by_column(batch), *rest, None if error is None else RemoteError.of(error))
