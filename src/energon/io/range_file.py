"""Files whose ranges are read, here or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from energon.io.address import redact
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
        self._store, self._key = open_store(address)
        info = self._store.info(self._key)
        self.size, self.version, self.mtime_ns = info.size, info.version, info.mtime_ns

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`, see `Store.read_range`."""
        return self._store.read_range(self._key, offset, offset + size, version=self.version)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, read in parallel."""
        ranges = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
        return self._store.read_ranges(self._key, ranges, version=self.version)
