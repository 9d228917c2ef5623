"""Bytes that can be read anywhere, as a file."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any


class RawReader(io.RawIOBase):
    """A file to read from and to seek in.

    Args:
        read: `read(start, stop)` returns these bytes.
        size: How many there are.
        name: For messages.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, name: str) -> None:
        self._read = read
        self._size = size
        self._position = 0
        self.name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.name}: cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self._next(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._next(self._size)

    def _next(self, count: int) -> bytes:
        stop = min(self._size, self._position + count)
        if stop <= self._position:
            return b""
        data = self._read(self._position, stop)
        self._position += len(data)
        return data
