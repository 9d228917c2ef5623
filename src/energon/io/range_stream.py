"""A range of a file as a file of its own: for decoders that read here and there."""

from __future__ import annotations

import io
import os
from typing import Any

from energon.io.range_file import RangeFile

LOCAL_BUFFER_BYTES = 128 << 10
REMOTE_BUFFER_BYTES = 1 << 20
"""What is fetched at a time; small reads are served from it."""


def open_range(file: RangeFile, offset: int, size: int) -> io.BufferedReader:
    """Return the bytes from `offset` on as a file of `size` bytes that can be read and sought."""
    buffer_bytes = REMOTE_BUFFER_BYTES if file.is_remote else LOCAL_BUFFER_BYTES
    return io.BufferedReader(_Range(file, offset, size), buffer_bytes)


class _Range(io.RawIOBase):
    def __init__(self, file: RangeFile, offset: int, size: int) -> None:
        self._file = file
        self._offset = offset
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self._file.path}: cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = max(0, min(len(view), self._size - self._position))
        if count:
            view[:count] = self._file.pread(self._offset + self._position, count)
            self._position += count
        return count
