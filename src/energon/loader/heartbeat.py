"""A page of shared memory in which a worker leaves where it is, for the case that it dies."""

from __future__ import annotations

import mmap
import os

from energon.loader.transport.slots import create_shared, map_shared

NOWHERE = -1

_BEATS, _LANE, _ROW, _SEVERAL = range(4)
_TRACE_OFFSET = mmap.PAGESIZE
_TRACE_SIZE = 1 << 16


class Heartbeat:
    """The page, seen from either side. Writing costs a few stores and no system call.

    Behind the page is room for the tracebacks that the worker's fault handler writes.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapping = map_shared(descriptor)
        self._cells = memoryview(self._mapping)[: 4 * 8].cast("q")

    @staticmethod
    def create() -> int:
        """Return a descriptor of a new page."""
        descriptor = create_shared(_TRACE_OFFSET + _TRACE_SIZE)
        Heartbeat(os.dup(descriptor)).leave()
        return descriptor

    def enter(self, lane: int) -> None:
        """Note that work on a batch of `lane` begins."""
        self._cells[_LANE] = lane
        self._cells[_BEATS] += 1

    def row(self, row: int, several: bool) -> None:
        """Note that user code gets the sample of this row, or several that begin with it."""
        self._cells[_SEVERAL] = several
        self._cells[_ROW] = row
        self._cells[_BEATS] += 1

    def leave(self) -> None:
        """Note that the batch is done."""
        self._cells[_ROW] = NOWHERE

    @property
    def beats(self) -> int:
        """How many steps the worker has made."""
        return self._cells[_BEATS]

    @property
    def address(self) -> tuple[int, int] | None:
        """The lane and row of the one sample that user code works on, or None."""
        lane, row = self._cells[_LANE], self._cells[_ROW]
        return None if row == NOWHERE or self._cells[_SEVERAL] else (lane, row)

    @property
    def where(self) -> str:
        """What the worker works on, in words."""
        if self._cells[_ROW] == NOWHERE:
            return "between samples"
        what = "in a batch or pack that begins at" if self._cells[_SEVERAL] else "at"
        return f"{what} lane {self._cells[_LANE]} row {self._cells[_ROW]}"

    def traceback(self) -> str:
        """Return what the fault handler of the worker has written, or ""."""
        written = self._mapping[_TRACE_OFFSET:]
        return written.rstrip(b"\0").decode(errors="replace").strip()


def seek_to_trace(descriptor: int) -> None:
    """Let what is written to `descriptor` go to the room for tracebacks."""
    os.lseek(descriptor, _TRACE_OFFSET, os.SEEK_SET)
