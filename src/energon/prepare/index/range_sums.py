"""Checksums of ranges of an object in a store, of which little is in memory at a time."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import TruncatedError
from energon.io.readers import SkippingReader

PIECE_BYTES = 1 << 20


class RangeSums:
    """The CRC-32 of ranges of an object, made of what is read of it in ascending order.

    Args:
        offsets: Where the ranges begin, ascending.
        sizes: How long they are.
        reader: Reads the object.
        origin: What messages call it.
    """

    def __init__(
        self, offsets: NDArray[Any], sizes: NDArray[Any], reader: SkippingReader, origin: str
    ) -> None:
        self._starts = offsets.astype(np.int64).tolist()
        self._stops = (offsets.astype(np.int64) + sizes.astype(np.int64)).tolist()
        self._reader = reader
        self._origin = origin
        self._found = [0] * len(self._starts)
        self._range = 0
        self._position = 0
        self._buffer = bytearray(PIECE_BYTES)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on, as `SkippingReader.read_into`."""
        self._advance(offset)
        count = self._reader.read_into(offset, buffer)
        known = self._position - offset
        if known < count:
            self._add(buffer[known:count])
        return count

    def finish(self) -> NDArray[np.uint32]:
        """Read what is left, and return the checksum of each range.

        Raises:
            TruncatedError: If the object ends before the last.
        """
        end = max(self._stops, default=0)
        self._advance(end)
        if self._position < end:
            raise TruncatedError(
                f"{self._origin}: ends at byte {self._position}, its index has contents up to "
                f"byte {end}; the shard is cut off, restore or write it again"
            )
        return np.array(self._found, np.uint32)

    def _advance(self, stop: int) -> None:
        """Read up to byte `stop`."""
        while self._position < stop:
            view = memoryview(self._buffer)[: min(PIECE_BYTES, stop - self._position)]
            count = self._reader.read_into(self._position, view)
            if not count:
                return
            self._add(view[:count])

    def _add(self, data: memoryview) -> None:
        """Take in what follows the bytes that were taken in so far."""
        begin, end = self._position, self._position + len(data)
        while self._range < len(self._starts) and self._starts[self._range] < end:
            start, stop = self._starts[self._range], self._stops[self._range]
            piece = data[max(0, start - begin) : max(0, stop - begin)]
            self._found[self._range] = zlib.crc32(piece, self._found[self._range])
            if stop > end:
                break
            self._range += 1
        self._position = end
