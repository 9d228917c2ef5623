"""Give the blocks of a tar archive, reading much at a time where it is needed, little elsewhere.

Archives of small members are read as a whole, in large pieces, into the same memory again and
again. Where the next header lies far behind the last one, only some kilobytes of it are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.formats.tar.headers import BLOCK

MAX_WINDOW_BYTES = 4 << 20
FIRST_WINDOW_BYTES = 256 << 10
MIN_WINDOW_BYTES = 4 << 10
JUMP_BYTES = 32 << 10
"""Content from here on is skipped rather than read."""

ReadInto = Callable[[int, memoryview], int]
"""`read_into(offset, buffer)` fills the buffer, less at the end of the file; returns how much."""


class TarWindow:
    """The part of an archive that is in memory.

    Args:
        read_into: Reads the archive.
        size: Its bytes.
    """

    def __init__(self, read_into: ReadInto, size: int) -> None:
        self._read_into = read_into
        self.size = size
        self.start = self.stop = 0
        self._wanted = FIRST_WINDOW_BYTES
        self._buffer = memoryview(bytearray(0))

    def block(self, position: int) -> bytes:
        """Return the block at a position, less of it or nothing if the archive ends there."""
        at = position - self.start
        if at < 0 or position + BLOCK > self.stop:
            self._fill(position)
            at = 0
        return bytes(self._buffer[at : min(at + BLOCK, self.stop - self.start)])

    def blocks(self, position: int) -> NDArray[np.uint8]:
        """Return all whole blocks in memory from a position on, as (blocks, 512).

        They are overwritten by the next call of another method.
        """
        if self.start <= position < self.stop:
            count = (self.stop - position) // BLOCK
            at = position - self.start
            rows: NDArray[Any] = np.frombuffer(self._buffer, np.uint8, count * BLOCK, at)
            return rows.reshape(count, BLOCK)
        return np.empty((0, BLOCK), np.uint8)

    def read(self, position: int, size: int) -> bytes:
        """Return bytes from a position on, fewer at the end of the archive."""
        if self.start <= position and position + size <= self.stop:
            at = position - self.start
            return bytes(self._buffer[at : at + size])
        data = bytearray(max(0, min(size, self.size - position)))
        found = self._read_into(position, memoryview(data))
        return bytes(data[:found])

    def expect_jumps(self) -> None:
        """Read little from now on: most of what was read was content of large members."""
        self._wanted = MIN_WINDOW_BYTES

    def _fill(self, position: int) -> None:
        if position - self.stop >= JUMP_BYTES:
            self._wanted = MIN_WINDOW_BYTES
        size = max(0, min(self._wanted, self.size - position))
        self._wanted = min(2 * self._wanted, MAX_WINDOW_BYTES)
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        self.start = position
        self.stop = position + (self._read_into(position, self._buffer[:size]) if size else 0)
