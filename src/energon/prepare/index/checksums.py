"""Checksums of ranges of a file, computed while it is read."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import TruncatedError
from energon.formats.tar.scan import ReadInto

CHECKED_PIECE_BYTES = 1 << 20


class RangeSums:
    """The CRC-32 of ranges of a file that is read in ascending order.

    Args:
        offsets: Where the ranges begin, ascending.
        sizes: How long they are.
        read_into: Reads the file.
        origin: Its name in messages.
    """

    def __init__(
        self, offsets: NDArray[Any], sizes: NDArray[Any], read_into: ReadInto, origin: str
    ) -> None:
        self._starts = offsets.astype(np.int64).tolist()
        self._stops = (offsets.astype(np.int64) + sizes.astype(np.int64)).tolist()
        self._read_into = read_into
        self._origin = origin
        self._found = [0] * len(self._starts)
        self._range = 0
        self._position = 0
        self._buffer = bytearray(CHECKED_PIECE_BYTES)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes that start at `offset`; return how many were read."""
        self._advance(offset)
        count = self._read_into(offset, buffer)
        known = self._position - offset
        if known < count:
            self._add(buffer[known:count])
        return count

    def finish(self) -> NDArray[np.uint32]:
        """Read the rest, and return the checksum of each range.

        Raises:
            TruncatedError: If the file ends before the last.
        """
        end = max(self._stops, default=0)
        self._advance(end)
        if self._position < end:
            raise TruncatedError(
                f"{self._origin}: ends at byte {self._position}, but its index has contents up to "
                f"byte {end}; the shard is truncated, restore or recreate it"
            )
        return np.array(self._found, np.uint32)

    def _advance(self, stop: int) -> None:
        """Read up to byte `stop`."""
        while self._position < stop:
            view = memoryview(self._buffer)[: min(CHECKED_PIECE_BYTES, stop - self._position)]
            count = self._read_into(self._position, view)
            if not count:
                return
            self._add(view[:count])

    def _add(self, data: memoryview) -> None:
        """Process the bytes that follow those processed so far."""
        begin, end = self._position, self._position + len(data)
        while self._range < len(self._starts) and self._starts[self._range] < end:
            start, stop = self._starts[self._range], self._stops[self._range]
            piece = data[max(0, start - begin) : max(0, stop - begin)]
            self._found[self._range] = zlib.crc32(piece, self._found[self._range])
            if stop > end:
                break
            self._range += 1
        self._position = end
