"""Files whose ranges are read, here or elsewhere, and ranges as files of their own."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import ClassVar, Protocol

from energon.io.address import redact
from energon.io.backends.base import ObjectInfo
from energon.io.local import cut_off
from energon.io.ranges import RemoteObject, read_ranges
from energon.io.readers import RawReader
from energon.io.registry import open_store


class RangeFile(Protocol):
    """A file that ranges are read from."""

    path: str
    """For messages, without secrets."""
    is_remote: ClassVar[bool]

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`."""

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges."""


class RemoteFile:
    """A remote file to read ranges of. Every answer is of the version that was opened.

    Args:
        address: Where it is.

    Raises:
        DatasetNotFoundError: If there is no such object.
        StorageError: If the store cannot be asked.
    """

    is_remote: ClassVar[bool] = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.path = redact(address)
        store, key = open_store(address)
        self.object = RemoteObject(store, store.info(key))

    @property
    def info(self) -> ObjectInfo:
        """Size and version."""
        return self.object.info

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            ObjectChangedError: If the file was replaced since it was opened.
            TruncatedError: If it ends earlier.
            StorageError: If it cannot be read.
        """
        return self.pread_many([offset], [size])[0]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, those that are not here yet by parallel requests."""
        end = self.info.size
        for offset, size in zip(offsets, sizes, strict=True):
            if offset + size > end >= 0:
                raise cut_off(self.path, end, offset, size)
        stops = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        return read_ranges(self.object, offsets, stops)


LOCAL_BUFFER_BYTES = 128 << 10
REMOTE_BUFFER_BYTES = 1 << 20
"""What is fetched at a time; small reads are served from it."""


def open_range(file: RangeFile, offset: int, size: int) -> io.BufferedReader:
    """Return the bytes from `offset` on as a file of `size` bytes that can be read and sought."""
    buffer_bytes = REMOTE_BUFFER_BYTES if file.is_remote else LOCAL_BUFFER_BYTES

    def read(start: int, stop: int) -> bytes:
        return file.pread(offset + start, stop - start)

    return io.BufferedReader(RawReader(read, size, file.path), buffer_bytes)
