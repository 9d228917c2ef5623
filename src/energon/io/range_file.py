"""Files read by range, local or remote, and ranges presented as files.

Remote objects are read from beginning to end, or in small pieces when looking for headers.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol
from weakref import ref

from energon.io.address import is_remote, redact
from energon.io.backends.base import ObjectInfo, request_is_needed, while_needed
from energon.io.backends.local import OpenFile, cut_off
from energon.io.files import open_store
from energon.io.ranges import RemoteObject, read_ranges


class RawReader(io.RawIOBase):
    """A seekable file over a function that reads ranges.

    Args:
        read: `read(start, stop)` returns these bytes.
        size: Size of the file in bytes.
        name: Its name in messages.
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


COPIED_CHUNK_BYTES = 2 << 20
CHUNKS_AHEAD = 4
SMALL_READ_BYTES = 16 << 10
"""Smallest request: a smaller one would be no faster."""
CHUNKS_BETWEEN_PROBES = 32
"""After this many chunks, latency is measured again with a small request. It is measured twice at
the beginning, since the very first answer includes opening a connection."""
MEMORY = 0.8
"""Weight of earlier measurements against the last one."""
ASSUMED_BYTES_PER_SECOND = 50e6


class SkippingReader:
    """Yields pieces of an object in ascending order. Used by one thread.

    Args:
        object_: What to read.
    """

    def __init__(self, object_: RemoteObject) -> None:
        self.object = object_
        self._chunks: dict[int, Future[tuple[bytes, float]]] = {}
        self._piece, self._piece_start = b"", 0
        self._stop = 0
        self._gap_bytes = 0.0
        self._wait_seconds = 0.0
        self._measured, self._until_probe = 0, 0
        self._bytes_per_second = ASSUMED_BYTES_PER_SECOND

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes that start at `offset`; return how many were read."""
        stop = min(offset + len(buffer), self.object.info.size)
        self._gap_bytes = _mixed(self._gap_bytes, max(0, offset - self._stop))
        at = offset
        for data in self._pieces(offset, stop):
            buffer[at - offset : at - offset + len(data)] = data
            at += len(data)
        self._stop = stop
        return max(0, stop - offset)

    def _pieces(self, offset: int, stop: int) -> Iterator[bytes]:
        while offset < stop:
            data = self._held(offset, stop)
            if data:
                yield data
                offset += len(data)
            elif self._is_far(offset, stop):
                self._forget()
                self._fetch_piece(offset, min(stop, offset + SMALL_READ_BYTES))
            elif self._until_probe <= 0:
                self._fetch_piece(offset, min(stop, offset + SMALL_READ_BYTES))
                self._until_probe = 0 if self._measured < 2 else CHUNKS_BETWEEN_PROBES
            else:
                self._fetch_chunk(offset)

    def _held(self, offset: int, stop: int) -> bytes:
        """Return the beginning of a range as far as it has been fetched already."""
        at = offset - self._piece_start
        return self._piece[at : at + stop - offset] if 0 <= at < len(self._piece) else b""

    def _is_far(self, offset: int, stop: int) -> bool:
        """Return whether requesting this piece alone is faster than fetching all up to it."""
        if offset // COPIED_CHUNK_BYTES in self._chunks or stop - offset > SMALL_READ_BYTES:
            return False
        return self._skips()

    def _skips(self) -> bool:
        return self._gap_bytes > self._wait_seconds * self._bytes_per_second

    def _fetch_piece(self, offset: int, stop: int) -> None:
        end = min(max(stop, offset + SMALL_READ_BYTES), self.object.info.size)
        start = time.perf_counter()
        self._piece, self._piece_start = self.object.read(offset, end), offset
        taken = time.perf_counter() - start
        if self._measured < 2:
            self._wait_seconds = min(self._wait_seconds or taken, taken)
        else:
            self._wait_seconds = _mixed(self._wait_seconds, taken)
        self._measured += 1

    def _fetch_chunk(self, offset: int) -> None:
        self._until_probe -= 1
        number = offset // COPIED_CHUNK_BYTES
        following = number + (1 if self._skips() else CHUNKS_AHEAD)
        self._forget(keep=range(number, number + CHUNKS_AHEAD))
        last = min(-(-self.object.info.size // COPIED_CHUNK_BYTES), following)
        reader, is_needed = ref(self), request_is_needed()
        with while_needed(lambda: reader() is not None and (is_needed is None or is_needed())):
            for ahead in range(number, last):
                if ahead not in self._chunks:
                    self._chunks[ahead] = self.object.store.submit(_chunk, self.object, ahead)
        together = len(self._chunks)
        self._piece, taken = self._chunks.pop(number).result()
        self._piece_start = number * COPIED_CHUNK_BYTES
        rate = together * len(self._piece) / max(taken, 1e-6)
        self._bytes_per_second = _mixed(self._bytes_per_second, rate)

    def _forget(self, keep: range = range(0)) -> None:
        """Drop chunks that are not needed, and cancel those not yet being fetched."""
        for number in [number for number in self._chunks if number not in keep]:
            self._chunks.pop(number).cancel()


def _chunk(object_: RemoteObject, number: int) -> tuple[bytes, float]:
    """Return a chunk, and the seconds that it took; without the reader, which may be dropped."""
    start = time.perf_counter()
    stop = min((number + 1) * COPIED_CHUNK_BYTES, object_.info.size)
    data = object_.read(number * COPIED_CHUNK_BYTES, stop)
    return data, time.perf_counter() - start


def _mixed(before: float, now: float) -> float:
    return MEMORY * before + (1 - MEMORY) * now


class RangeFile(Protocol):
    """A file that can be read by range."""

    path: str
    """For messages, without secrets."""

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request."""

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`."""

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges."""


class RemoteFile:
    """A remote file read by range. Every read returns the version that was opened.

    Args:
        address: Its address.
        info: Size and version if known; None requests them from the store.

    Raises:
        DatasetNotFoundError: If there is no such object.
        StorageError: If the request fails.
    """

    is_remote: ClassVar[bool] = True

    def __init__(self, address: str, *, info: ObjectInfo | None = None) -> None:
        self.address = address
        self.path = redact(address)
        store, key = open_store(address)
        self.object = RemoteObject(store, store.info(key) if info is None else info)

    @property
    def info(self) -> ObjectInfo:
        """Size and version."""
        return self.object.info

    @property
    def size(self) -> int:
        """Its size in bytes; -1 if unknown."""
        return self.object.info.size

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            ObjectChangedError: If the file was replaced since it was opened.
            TruncatedError: If it ends earlier.
            StorageError: If it cannot be read.
        """
        return self.pread_many([offset], [size])[0]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, requesting missing ones in parallel."""
        end = self.info.size
        for offset, size in zip(offsets, sizes, strict=True):
            if offset + size > end >= 0:
                raise cut_off(self.path, end, offset, size)
        stops = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        return read_ranges(self.object, offsets, stops)


def range_file(address: str, *, info: ObjectInfo | None = None) -> RemoteFile | OpenFile:
    """Return a file, open for reading ranges.

    Args:
        address: Its path or address.
        info: Size and version of a remote file, if known.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it cannot be opened.
    """
    return RemoteFile(address, info=info) if is_remote(address) else OpenFile(address)


LOCAL_BUFFER_BYTES = 128 << 10
REMOTE_BUFFER_BYTES = 1 << 20
"""Bytes fetched at a time; small reads are served from this buffer."""


def open_range(file: RangeFile, offset: int, size: int) -> io.BufferedReader:
    """Return the bytes that start at `offset` as a seekable file of `size` bytes."""
    buffer_bytes = REMOTE_BUFFER_BYTES if file.is_remote else LOCAL_BUFFER_BYTES

    def read(start: int, stop: int) -> bytes:
        return file.pread(offset + start, stop - start)

    return io.BufferedReader(RawReader(read, size, file.path), buffer_bytes)
