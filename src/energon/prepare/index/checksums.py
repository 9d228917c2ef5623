"""Checksums: of parts, of shards, and of ranges without reading them again."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import TruncatedError
from energon.formats.tar.scan_builder import TarScan
from energon.io.range_file import SkippingReader
from energon.local_file import open_binary

CHECKED_PIECE_BYTES = 1 << 20


class RangeSums:
    """The CRC-32 of ranges of an object, computed from what is read of it in ascending order.

    Args:
        offsets: Where the ranges begin, ascending.
        sizes: How long they are.
        reader: Reads the object.
        origin: Its name in messages.
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
        self._buffer = bytearray(CHECKED_PIECE_BYTES)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes that start at `offset`, like `SkippingReader.read_into`."""
        self._advance(offset)
        count = self._reader.read_into(offset, buffer)
        known = self._position - offset
        if known < count:
            self._add(buffer[known:count])
        return count

    def finish(self) -> NDArray[np.uint32]:
        """Read the rest, and return the checksum of each range.

        Raises:
            TruncatedError: If the object ends before the last.
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
            count = self._reader.read_into(self._position, view)
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


CHECKED_BYTES = 8 << 20


def with_checksums(path: Path, scan: TarScan) -> TarScan:
    """Return the index of a shard, with the checksum of each part."""
    found = content_crc32(path, scan.part_offset, scan.part_size)
    return replace(scan, part_crc32=found)


def content_crc32(path: Path, offsets: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.uint32]:
    """Return the CRC-32 of ranges of a file, given in ascending order.

    Raises:
        TruncatedError: If the file ends before the last.
    """
    checksums = np.zeros(len(offsets), np.uint32)
    with open_binary(path, buffering=0) as file:
        for first, last in _groups(offsets, sizes):
            start = int(offsets[first])
            if last - first == 1:
                checksums[first] = _of_range(file.fileno(), path, start, int(sizes[first]))
                continue
            span = int(offsets[last - 1]) + int(sizes[last - 1]) - start
            data = memoryview(_read(file.fileno(), path, start, span))
            begins = (offsets[first:last].astype(np.int64) - start).tolist()
            ends = np.add(begins, sizes[first:last].astype(np.int64)).tolist()
            checksums[first:last] = [
                zlib.crc32(data[begin:end]) for begin, end in zip(begins, ends, strict=True)
            ]
    return checksums


def _groups(offsets: NDArray[Any], sizes: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield runs of ranges that are read together."""
    stops = offsets.astype(np.int64) + sizes.astype(np.int64)
    first = 0
    while first < len(offsets):
        limit = int(offsets[first]) + CHECKED_BYTES
        last = max(first + 1, int(np.searchsorted(stops, limit, side="right")))
        yield first, last
        first = last


def _of_range(descriptor: int, path: Path, start: int, size: int) -> int:
    checksum = 0
    for begin in range(start, start + size, CHECKED_BYTES):
        count = min(CHECKED_BYTES, start + size - begin)
        checksum = zlib.crc32(_read(descriptor, path, begin, count), checksum)
    return checksum


def _read(descriptor: int, path: Path, start: int, size: int) -> bytes:
    data = os.pread(descriptor, size, start)
    if len(data) < size:
        raise TruncatedError(
            f"{path}: ends at byte {start + len(data)}, expected {size} bytes from byte {start}; "
            f"the shard is truncated, restore or recreate it"
        )
    return data
