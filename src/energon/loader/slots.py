"""The shared memory of a worker: a few slots that are written, read, and written again.

Reusing slots saves what new memory costs: the system has to clear every page of it, and both
sides have to map it. There are never more slots than batches may wait, plus those that the
trainer still looks into.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from energon.loader.shared_memory import create_shared

SMALLEST_SLOT = 1 << 18
LEASES = 2
"""How many slots of a worker the trainer may look into: the batch in hand and the next one.
When it keeps more, further batches are copied."""

_DECAY = 0.98
_SHRINK_RATIO = 4


class Slot:
    """A run of shared memory that is written from its beginning."""

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
        """Give the memory back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self.capacity, self.view = None, 0, memoryview(b"")

    def write(self, data: object) -> int:
        """Append the bytes of `data`, which may be any buffer, and return how many."""
        if type(data) is not bytes:
            data = memoryview(data).cast("B")  # type: ignore[arg-type]
        stop = self.position + len(data)
        if stop > self.capacity:
            self.allocate(stop)
        self.view[self.position : stop] = data
        self.position = stop
        return len(data)

    def align(self, size: int) -> None:
        """Go on at the next multiple of `size` bytes."""
        self.position = -(-self.position // size) * size


class SlotPool:
    """The slots of one worker, as seen by the worker.

    A slot is free, being written, sent (the parent has not received it) or leased (the parent
    has received it, and the trainer looks into it).

    Args:
        prefetch: How many slots may be sent and not received.
        max_bytes: How much memory all slots may take, unless a single one needs more.
    """

    def __init__(self, *, prefetch: int, max_bytes: int) -> None:
        self._prefetch = prefetch
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

        The one used last comes first: it is still in the cache of the processor.
        """
        while len(self._sent) >= self._prefetch or not (self._free or self._may_grow()):
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
        """Note that `slot` is on its way."""
        self._sent.add(slot.index)
        self._needed = max(slot.position, self._needed * _DECAY)

    def leased(self, index: int) -> None:
        """Note that the parent has received slot `index` and keeps it for now."""
        self._sent.discard(index)

    def freed(self, index: int) -> None:
        """Note that the parent is done with slot `index`."""
        self._sent.discard(index)
        self._free.append(self._slots[index])

    def put_back(self, slot: Slot) -> None:
        """Return a slot that was taken and not sent."""
        self._free.append(slot)

    def _may_grow(self) -> bool:
        if len(self._slots) >= self._prefetch + LEASES:
            return False
        # While nothing is on its way, no message can come that frees a slot.
        used = sum(slot.capacity for slot in self._slots)
        return not self._sent or used + self._needed <= self._max_bytes
