"""A remote object on local disk, fetched block by block on demand.

The data file may have holes; a map beside it stores a checksum for each block present. Blocks are
verified on every read, and damaged ones are fetched again. All processes of a machine share the
file; a block that one process is fetching makes the others wait for it. If a server serves whole
objects only, blocks can be read while the rest is still downloading.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from energon.errors import StorageError
from energon.io.file_lock import hold_byte, hold_lock, release_byte, release_lock
from energon.local_file import map_writable

BLOCK_BYTES = 1 << 20
RUN_BLOCKS = 8
"""Maximum number of blocks per request."""
BLOCK_POLL_SECONDS = 0.02
"""How often to check whether another process has fetched a block."""
BLOCK_RETRY_SECONDS = 30.0
"""How long not to write to a disk that was full."""

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"ENERBLK1"

Read = Callable[[int, int], bytes]
OpenStream = Callable[[], Iterator[bytes]]


class BlockFile:
    """One version of an object. May be used by many threads; a process opens each file once.

    No descriptor stays open, so any number of objects can be cached. Files that are
    deleted in the meantime are created again, empty, with the next block. While the disk cannot be
    written, every read is a request.

    Args:
        path: The data file; the map is stored beside it, with `.map` appended.
        size: Bytes of the object.
        read: Fetches a range.
        stream: Yields the whole object if the server does not support ranges; None if it does.
        written: Called with the number of bytes written.
        failed: Called with the reason when a write fails.
        count: Called for each range read with `cache_hits`, `cache_misses`, or `cache_failed` if
            it could not be written to disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        read: Read,
        stream: OpenStream | None = None,
        written: Callable[[int], None] = lambda count: None,
        failed: Callable[[OSError], None] = lambda error: None,
        count: Callable[..., None] = lambda **counts: None,
    ) -> None:
        self.path = path
        self.size = size
        self._read = read
        self._stream = stream
        self._written = written
        self._failed = failed
        self._tell = count
        self._retry_at = 0.0
        self._count = -(-size // BLOCK_BYTES)
        self._mapped: tuple[int, int] | None = None
        """Device and inode of the map in memory."""
        self._claims = -1
        """A descriptor of the map, open while blocks are claimed: closing it releases them all."""
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._sums = np.zeros(self._count, np.uint32)
        try:
            self._open_map()
            self._close_map()
        except OSError as error:
            self._pause(error)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range, fetching the blocks that are missing."""
        last = -(-stop // BLOCK_BYTES)
        parts, result = [], "cache_hits"
        for block in range(start // BLOCK_BYTES, last):
            data = self._load(block)
            if data is None:
                if time.monotonic() < self._retry_at:
                    # Blocks would be fetched for nothing but this range.
                    self._tell(cache_failed=1)
                    return read_through(start, stop, self._read, self._stream)
                data, result = self._block(block, last), "cache_misses"
            begin = block * BLOCK_BYTES
            parts.append(data[max(0, start - begin) : stop - begin])
        self._tell(**{result: 1})
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _block(self, block: int, stop: int) -> bytes:
        """Return a block; if it has to be fetched, fetch those before `stop` with it."""
        data = self._load(block)
        while data is None:
            token = block if self._stream is None else self._count
            if self._claim(token):
                data = self._fetch(block, stop)
            elif time.monotonic() < self._retry_at:
                begin = block * BLOCK_BYTES
                end = min(self.size, begin + BLOCK_BYTES)
                return read_through(begin, end, self._read, self._stream)
            else:
                with self._changed:
                    self._changed.wait(BLOCK_POLL_SECONDS)
                data = self._load(block)
        return data

    def _load(self, block: int) -> bytes | None:
        """Return a block if it is present and intact."""
        expected = int(self._sums[block])
        if not expected:
            return None
        try:
            with open(self.path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), BLOCK_BYTES, block * BLOCK_BYTES)
        except OSError:
            return None
        return data if _checksum(data) == expected else None

    def _fetch(self, block: int, stop: int) -> bytes:
        """Fetch a block that is already claimed, and the unclaimed ones after it."""
        claimed = [block] if self._stream is None else [self._count]
        try:
            found = self._load(block)
            if found is not None:
                return found
            if self._stream is not None:
                return self._fetch_all(self._stream, block)
            last = block + 1
            while last < min(stop, block + RUN_BLOCKS) and not self._sums[last]:
                if not self._claim(last):
                    break
                claimed.append(last)
                last += 1
            begin = block * BLOCK_BYTES
            data = self._read(begin, min(self.size, last * BLOCK_BYTES))
            for number in range(block, last):
                self._store(number, data[number * BLOCK_BYTES - begin :][:BLOCK_BYTES])
            return data[:BLOCK_BYTES]
        finally:
            self._release(claimed)

    def _fetch_all(self, stream: OpenStream, block: int) -> bytes:
        """Fetch the whole object, storing each block as it arrives; return one of them."""
        left, number, total, requested = bytearray(), 0, 0, b""
        for chunk in stream():
            left += chunk
            total += len(chunk)
            while len(left) >= BLOCK_BYTES or (left and total == self.size):
                data = bytes(left[:BLOCK_BYTES])
                del left[:BLOCK_BYTES]
                self._store(number, data)
                requested = data if number == block else requested
                number += 1
            if total > self.size:
                break
        if total != self.size:
            raise StorageError(
                f"{self.path.name}: got {total} bytes or more, expected {self.size} in all; the "
                "object has changed, open it again"
            )
        return requested

    def _store(self, block: int, data: bytes) -> None:
        try:
            descriptor = _open(self.path)
            try:
                _write(descriptor, data, block * BLOCK_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._pause(error)
            return
        self._sums[block] = _checksum(data)
        self._written(len(data))
        with self._changed:
            self._changed.notify_all()

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while: the cache is for speed, blocks can be fetched again."""
        self._retry_at = time.monotonic() + BLOCK_RETRY_SECONDS
        self._failed(error)

    def _claim(self, block: int) -> bool:
        """Claim the right to fetch a block, among all threads and processes."""
        with self._changed:
            if block in self._busy:
                return False
            try:
                if self._claims < 0:
                    self._open_map()
            except OSError as error:
                self._pause(error)
                return False
            if not hold_byte(self._claims, block):
                self._close_map()
                return False
            self._busy.add(block)
            return True

    def _release(self, blocks: Sequence[int]) -> None:
        with self._changed:
            for block in blocks:
                self._busy.discard(block)
                release_byte(self._claims, block)
            self._close_map()
            self._changed.notify_all()

    def _open_map(self) -> None:
        """Open the map to claim blocks, and map it unless it is the one in memory."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._claims = _open(f"{self.path}.map")
        about = os.fstat(descriptor)
        if (about.st_dev, about.st_ino) == self._mapped:
            return
        try:
            hold_lock(descriptor)
            try:
                length = self._write_header(descriptor)
            finally:
                release_lock(descriptor)
            memory = map_writable(descriptor, length)
        except BaseException:
            self._close_map()
            raise
        self._sums = np.frombuffer(memory, np.uint32, self._count, _HEADER.size)
        self._mapped = (about.st_dev, about.st_ino)

    def _write_header(self, descriptor: int) -> int:
        """Make the map and the data as long as they have to be; return the length of the map."""
        header = _HEADER.pack(_MAGIC, self.size, BLOCK_BYTES)
        length = len(header) + 4 * self._count
        if os.pread(descriptor, len(header), 0) != header or _size(descriptor) != length:
            os.ftruncate(descriptor, 0)
            _write(descriptor, header + bytes(length - len(header)), 0)
        elif hasattr(os, "posix_fallocate"):
            # A process that writes to memory that the disk has no room for is killed.
            os.posix_fallocate(descriptor, 0, length)
        data = _open(self.path)
        try:
            if _size(data) != self.size:
                os.ftruncate(data, self.size)
        finally:
            os.close(data)
        return length

    def _close_map(self) -> None:
        """Close the map unless blocks are claimed. Its memory stays."""
        if not self._busy and self._claims >= 0:
            os.close(self._claims)
            self._claims = -1


def read_through(start: int, stop: int, read: Read, stream: OpenStream | None) -> bytes:
    """Return a range of an object, from a stream of the whole if ranges are not supported."""
    if stream is None:
        return read(start, stop)
    parts, place = [], 0
    for chunk in stream():
        part = chunk[max(0, start - place) : max(0, stop - place)]
        parts.append(part)
        place += len(chunk)
        if place >= stop:
            return b"".join(parts)
    raise StorageError(f"got {place} bytes, expected {stop}; the object has changed, open it again")


def _open(path: str | os.PathLike[str]) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`: a disk that is nearly full accepts only part of it at first."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) or 1
