"""A range of a file as a file of its own: for decoders that read here and there."""

from __future__ import annotations

import io

from energon.io.range_file import RangeFile
from energon.io.raw_reader import RawReader

LOCAL_BUFFER_BYTES = 128 << 10
REMOTE_BUFFER_BYTES = 1 << 20
"""What is fetched at a time; small reads are served from it."""


def open_range(file: RangeFile, offset: int, size: int) -> io.BufferedReader:
    """Return the bytes from `offset` on as a file of `size` bytes that can be read and sought."""
    buffer_bytes = REMOTE_BUFFER_BYTES if file.is_remote else LOCAL_BUFFER_BYTES

    def read(start: int, stop: int) -> bytes:
        return file.pread(offset + start, stop - start)

    return io.BufferedReader(RawReader(read, size, file.path), buffer_bytes)
