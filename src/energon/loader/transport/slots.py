"""The shared memory of a worker: unnamed slots that are written, read and written again.

In one more page, a worker leaves its current position in case it dies.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from operator import setitem
from pickle import PickleBuffer
from typing import Any, NamedTuple

import numpy as np

from energon.worker import WorkerConfig

ALIGNMENT = 64


def create_shared(size: int, path: str | None = None) -> int:
    """Return a file descriptor of `size` bytes of zeroed memory, in a new file if it has a path.

    The memory lives as long as a process maps it or holds a descriptor of it; the system reclaims
    it when the last one is gone, however that happens.
    """
    if path is not None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    else:
        descriptor = _unnamed()
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EFBIG:
            reason = f"may not create {size} bytes of shared memory; raise `ulimit -f`"
            raise OSError(errno.EFBIG, reason) from error
        raise
    return descriptor


def _unnamed() -> int:
    try:
        return os.memfd_create("energon")
    except (AttributeError, OSError):
        # Not Linux: a file that is unlinked while it is still empty.
        descriptor, path = tempfile.mkstemp(prefix="energon-")
        os.unlink(path)
        return descriptor


def share_bytes(data: bytes) -> int:
    """Return a descriptor of shared memory that contains `data`."""
    descriptor = create_shared(len(data))
    if data:
        with mmap.mmap(descriptor, len(data)) as mapping:
            mapping[:] = data
    return descriptor


def read_shared(descriptor: int) -> bytes:
    """Return the contents of the shared memory and close the descriptor."""
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return b""
        with mmap.mmap(descriptor, size) as mapping:
            return bytes(mapping)
    finally:
        os.close(descriptor)


def map_shared(descriptor: int) -> mmap.mmap:
    """Map all of the shared memory for reading and writing, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class SharedMemory:
    """Memory that a worker writes to, and that several processes view.

    Args:
        descriptor: A descriptor of it, which is closed with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.token = next(_tokens)
        """Its number in this process."""
        self._mapping: mmap.mmap | None = None
        self._viewed: Callable[[], Any] = _nothing
        self._was_viewed = False

    def view(self) -> Any:
        """Return the content as an array of bytes; writing to it changes no other process.

        While the array is in use, it is returned again. Mapping pages takes longer than reading
        them, so they stay mapped after that, except for copies, which writing has made.
        """
        view = self._viewed()
        if view is None:
            self.reset()
            if self._mapping is None:
                access = mmap.PROT_READ | mmap.PROT_WRITE
                self._mapping = mmap.mmap(self.descriptor, self.size, mmap.MAP_PRIVATE, access)
            view = np.frombuffer(self._mapping, np.uint8)
            self._viewed, self._was_viewed = weakref.ref(view), True
        return view

    def reset(self) -> None:
        """Discard what was written to a view that is gone.

        This takes half a millisecond for 64 MB, so it is best called before waiting for a batch.
        """
        if self._was_viewed and self._viewed() is None:
            self._was_viewed = False
            if self._mapping is not None and not _discard_copies(self._mapping):
                self._mapping = None

    def __del__(self) -> None:
        os.close(self.descriptor)


_tokens = count()
PAGE_MAP = "/proc/self/pagemap"
_PAGE_KINDS = np.uint64(61)
"""From this bit on, an entry of the page map says: not a copy, swapped out, present."""


def _nothing() -> None:
    """Return None, as a reference to something that is gone does."""


def _discard_copies(mapping: mmap.mmap) -> bool:
    """Discard the pages of a private mapping that are copies, since they were written to.

    See pagemap.rst of the Linux kernel. Returns False if there is no page map, as on macOS.
    """
    pages = np.frombuffer(mapping, np.uint8)
    first = pages.__array_interface__["data"][0] // mmap.PAGESIZE
    number = -(-len(pages) // mmap.PAGESIZE)
    try:
        with open(PAGE_MAP, "rb", buffering=0) as file:
            file.seek(8 * first)
            kinds = np.frombuffer(file.read(8 * number), np.uint64) >> _PAGE_KINDS
    except OSError:
        return False
    copies = np.flatnonzero((kinds > 1) & (kinds % 2 == 0))
    if len(copies):
        start, stop = mmap.PAGESIZE * int(copies[0]), mmap.PAGESIZE * (int(copies[-1]) + 1)
        mapping.madvise(mmap.MADV_DONTNEED, start, min(stop, len(pages)) - start)
    return len(kinds) == number


SlotRange = tuple[int, int]


class EventLayout(NamedTuple):
    """Where the pickle of one event and its buffers begin and end, in bytes of the slot."""

    lane: int
    start: int
    stop: int
    buffers: Sequence[SlotRange] = ()


class EventTable:
    """The table while it grows, in the worker.

    Example:
        >>> table = EventTable()
        >>> table.append(EventLayout(lane=2, start=0, stop=9, buffers=[(64, 80)]))
        >>> read_table(memoryview(table.to_bytes()))
        [EventLayout(lane=2, start=0, stop=9, buffers=[(64, 80)])]
    """

    def __init__(self) -> None:
        self._numbers = array("q")
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, layout: EventLayout) -> None:
        """Add an event."""
        lane, start, stop, buffers = layout
        self._numbers.extend((lane, start, stop, len(buffers)))
        for span in buffers:
            self._numbers.extend(span)
        self._length += 1

    def clear(self) -> None:
        """Begin a new table."""
        del self._numbers[:]
        self._length = 0

    def to_bytes(self) -> bytes:
        """Return the table in the form that `read_table` reads."""
        return self._numbers.tobytes()


def read_table(data: memoryview) -> list[EventLayout]:
    """Return the events of a table, in order."""
    numbers = iter(data.cast("q").tolist())
    return [
        EventLayout(lane, start, stop, [(next(numbers), next(numbers)) for _ in range(count)])
        for lane, start, stop, count in zip(*[numbers] * 4, strict=True)
    ]


SMALLEST_SLOT = 1 << 18
SMALL_SLOT = 1 << 20
"""Twice as many of up to this size may be in transit. A full bundle of quick batches is smaller."""
LEASES = 4
"""How many slots of a worker may be viewed: the current batch of the trainer and the next one, and
those of other processes of its replica. If more are kept, further batches are copied."""
RANK_LEASES = 2
"""How many slots a rank may view of workers that it shares, if it is alone in its replica."""


def leases_of_rank(config: WorkerConfig) -> int:
    """Return how many slots a rank may hold of workers that it shares; one is under way."""
    return 1 + (LEASES if config.is_replicated else RANK_LEASES)


_DECAY = 0.98
_SHRINK_RATIO = 4


class Slot:
    """A region of shared memory that is written from its beginning."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.capacity = 0
        self.position = 0
        self.is_announced = False
        self._descriptor: int | None = None
        self.view = memoryview(b"")

    def allocate(self, size: int) -> None:
        """Replace the memory by new memory of at least `size` bytes; keep what is written."""
        capacity = max(SMALLEST_SLOT, 1 << (size - 1).bit_length())
        descriptor = create_shared(capacity)
        view = memoryview(mmap.mmap(descriptor, capacity))
        view[: self.position] = self.view[: self.position]
        self.release()
        self._descriptor, self.capacity, self.view = descriptor, capacity, view
        self.is_announced = False

    def announce(self) -> tuple[int, ...]:
        """Return the descriptor to be sent with the slot, if the parent does not have it."""
        if self.is_announced or self._descriptor is None:
            return ()
        self.is_announced = True
        return (self._descriptor,)

    def release(self) -> None:
        """Release the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self.capacity, self.view = None, 0, memoryview(b"")

    def write(self, data: object) -> int:
        """Append the bytes of `data`, which may be any buffer, and return their number."""
        if type(data) is not bytes:
            data = memoryview(data).cast("B")  # type: ignore[arg-type]
        stop = self.position + len(data)
        if stop > self.capacity:
            self.allocate(stop)
        self.view[self.position : stop] = data
        self.position = stop
        return len(data)

    def write_buffer(self, buffer: PickleBuffer) -> tuple[int, int]:
        """Append a buffer, aligned; return where it begins and ends."""
        self.align(ALIGNMENT)
        start = self.position
        self.write(buffer.raw())
        return start, self.position

    def align(self, size: int) -> None:
        """Continue at the next multiple of `size` bytes."""
        self.position = -(-self.position // size) * size


class SlotPool:
    """The slots of one worker, as seen by the worker.

    A slot is free, being written, sent (the parent has not received it) or leased (the parent has
    received it, and the trainer views it).

    Args:
        prefetch: How many slots may be sent but not received; twice as many if they are small.
            These are emptied quickly, so each time that another program runs first, a worker
            would wait: two workers sent 1.45 times as many samples on a busy machine.
        max_bytes: How much memory all slots may take, unless a single one needs more.
        leases: How many slots may be viewed.
    """

    def __init__(self, *, prefetch: int, max_bytes: int, leases: int = LEASES) -> None:
        self._prefetch = prefetch
        self._leases = leases
        self._max_bytes = max_bytes
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._sent: set[int] = set()
        self._needed = 0.0

    @property
    def num_sent(self) -> int:
        """How many slots are sent and not yet received."""
        return len(self._sent)

    def take(self, wait: Callable[[], None]) -> Slot:
        """Return a slot to write to; call `wait` while there is none.

        The most recently used one comes first: it is still in the processor cache.
        """
        while len(self._sent) >= self._most_sent or not (self._free or self._may_grow()):
            wait()
        if not self._free:
            self._slots.append(Slot(len(self._slots)))
            self._free.append(self._slots[-1])
        slot = self._free.pop()
        if slot.capacity > _SHRINK_RATIO * max(self._needed, SMALLEST_SLOT):
            slot.release()
        slot.position = 0
        if slot.capacity < self._needed:
            slot.allocate(int(self._needed))
        return slot

    def sent(self, slot: Slot) -> None:
        """Record that `slot` is in transit."""
        self._sent.add(slot.index)
        self._needed = max(slot.position, self._needed * _DECAY)

    def leased(self, index: int) -> None:
        """Record that the parent has received slot `index` and keeps it for now."""
        self._sent.discard(index)

    def freed(self, index: int) -> None:
        """Record that the parent is done with slot `index`."""
        self._sent.discard(index)
        self._free.append(self._slots[index])

    def put_back(self, slot: Slot) -> None:
        """Return a slot that was taken but not sent."""
        self._free.append(slot)

    @property
    def _most_sent(self) -> int:
        return self._prefetch * (2 if self._needed <= SMALL_SLOT else 1)

    def _may_grow(self) -> bool:
        if len(self._slots) >= self._most_sent + self._leases:
            return False
        # While nothing is in transit, no message can arrive that frees a slot.
        used = sum(slot.capacity for slot in self._slots)
        return not self._sent or used + self._needed <= self._max_bytes


NO_LANE = -1
SEVERAL = -2
"""Minus the row at which several samples begin."""

_BEATS, _LANE, _ROW, _HOLDS = range(4)
_TRACE_OFFSET = mmap.PAGESIZE
_TRACE_SIZE = 1 << 16
PAGE_BYTES = _TRACE_OFFSET + _TRACE_SIZE


class Heartbeat:
    """The page, as seen from either side. Writing costs a few stores and no system call.

    It is followed by room for the tracebacks that the worker's fault handler writes.
    """

    def __init__(self, page: mmap.mmap | bytearray) -> None:
        self._page = page
        self._cells = memoryview(page)[: 4 * 8].cast("q")
        # Half the time of the method `__setitem__`, whose arguments become a tuple.
        self.next_row = partial(setitem, self._cells, _ROW)

    @staticmethod
    def create(path: str | None = None) -> int:
        """Return a descriptor of a new page, which is a file if it has a path."""
        descriptor = create_shared(PAGE_BYTES, path)
        Heartbeat(map_shared(os.dup(descriptor))).leave()
        return descriptor

    def enter(self, lane: int) -> None:
        """Record that work on a batch of `lane` begins."""
        self._cells[_LANE] = lane
        self._cells[_BEATS] += 1

    def row(self, row: int, several: bool) -> None:
        """Record that user code receives the sample at this row, or several beginning with it."""
        self._cells[_ROW] = SEVERAL - row if several else row
        self._cells[_BEATS] += 1

    def leave(self) -> None:
        """Record that the batch is done."""
        self._cells[_ROW] = NO_LANE

    def hold(self, holds: bool) -> None:
        """Record whether batches that are done are held back."""
        self._cells[_HOLDS] = holds

    @property
    def holds(self) -> bool:
        """Whether batches that are done are held back."""
        return bool(self._cells[_HOLDS])

    @property
    def beats(self) -> tuple[int, int]:
        """Changes with every step of the worker; (0, ...) before the first."""
        return self._cells[_BEATS], self._cells[_ROW]

    @property
    def lane_row(self) -> tuple[int, int] | None:
        """The lane and row of the single sample that user code works on, or None."""
        lane, row = self._cells[_LANE], self._cells[_ROW]
        return (lane, row) if row >= 0 else None

    @property
    def where(self) -> str:
        """Describe what the worker works on."""
        lane, row = self._cells[_LANE], self._cells[_ROW]
        if row == NO_LANE:
            return "between samples"
        if row < 0:
            return f"in a batch or pack that begins at lane {lane} row {SEVERAL - row}"
        return f"at lane {lane} row {row}"

    @property
    def content(self) -> bytes:
        """The page without the room for tracebacks, to be copied to another machine."""
        return bytes(self._page[:_TRACE_OFFSET])

    def leave_traceback(self, text: str) -> None:
        """Replace the text that the fault handler of the worker has written."""
        written = text.encode()[:_TRACE_SIZE]
        self._page[_TRACE_OFFSET:] = written.ljust(_TRACE_SIZE, b"\0")

    def traceback(self) -> str:
        """Return the text that the fault handler of the worker has written, or ""."""
        written = self._page[_TRACE_OFFSET:]
        return written.rstrip(b"\0").decode(errors="replace").strip()


def seek_to_trace(descriptor: int) -> None:
    """Redirect what is written to `descriptor` into the room for tracebacks."""
    os.lseek(descriptor, _TRACE_OFFSET, os.SEEK_SET)
