"""Checksums of the contents of a shard, for which all of it is read."""

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

READ_BYTES = 8 << 20


def with_checksums(path: Path, scan: TarScan) -> TarScan:
    """Return what was found in a shard, with the checksum of each part."""
    found = content_crc32(path, scan.part_offset, scan.part_size)
    return replace(scan, part_crc32=found)


def content_crc32(path: Path, offsets: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.uint32]:
    """Return the CRC-32 of ranges of a file, which lie in ascending order.

    Raises:
        TruncatedError: If the file ends before the last.
    """
    checksums = np.zeros(len(offsets), np.uint32)
    with open(path, "rb", buffering=0) as file:
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
        limit = int(offsets[first]) + READ_BYTES
        last = max(first + 1, int(np.searchsorted(stops, limit, side="right")))
        yield first, last
        first = last


def _of_range(descriptor: int, path: Path, start: int, size: int) -> int:
    checksum = 0
    for begin in range(start, start + size, READ_BYTES):
        count = min(READ_BYTES, start + size - begin)
        checksum = zlib.crc32(_read(descriptor, path, begin, count), checksum)
    return checksum


def _read(descriptor: int, path: Path, start: int, size: int) -> bytes:
    data = os.pread(descriptor, size, start)
    if len(data) < size:
        raise TruncatedError(
            f"{path}: ends at byte {start + len(data)}, wanted {size} bytes from byte {start}; the "
            "shard is cut off, restore or write it again"
        )
    return data
