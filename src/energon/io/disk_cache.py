"""Files on local disk that can be had again, whole or by block, shared by all processes.

`DiskCache` is the one class of caches on disk: it enforces the limits, deletes the least recently
used entries with all files that belong to them, detects damage, and warns once about a disk that
cannot be written. A `CachePolicy` describes the arrangement of the files: `COPIES` of remote
objects in this module, streamed shards in `webdataset/reading`, files of cache pools in `cache`.

All processes add the size of an entry to one small file in the folder before they write it. Once
the sum reaches the limit, the folder is scanned, the least recently used entries are deleted, and
the sum is corrected. The time of use is the access time, set explicitly. An entry of `COPIES`
belongs to one version of one object: its name is a digest of address and version, so a replaced
object never meets an old copy. The folder of a cache may be deleted at any time: programs that use
it fetch again and continue, as they do when an entry is damaged or the disk is full. Only speed
depends on the cache.

The data file of a `BlockFile` may have holes; a map beside it stores a checksum for each block
present. Blocks are verified on every read, and damaged ones are fetched again. A block that one
process is fetching makes the others wait for it. If a server serves whole objects only, blocks can
be read while the rest is still downloading.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from energon.errors import ConfigError, EnergonError, FormatError, StorageError
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import (
    FileLock,
    hold_byte,
    hold_lock,
    is_full,
    is_unsupported,
    locked,
    release_byte,
    release_lock,
    write_atomic,
)
from energon.io.backends.base import ObjectInfo
from energon.io.settings import StorageSettings
from energon.io.store import Store
from energon.io.threads import fork_safe_lock
from energon.local_file import map_file, map_writable
from energon.messages import warn_once

logger = logging.getLogger("energon")

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
            present = self._load(block)
            if present is not None:
                return present
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
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) == self._mapped:
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
        self._mapped = (status.st_dev, status.st_ino)

    def _write_header(self, descriptor: int) -> int:
        """Make the map and the data as long as they have to be; return the length of the map."""
        header = _HEADER.pack(_MAGIC, self.size, BLOCK_BYTES)
        length = len(header) + 4 * self._count
        if os.pread(descriptor, len(header), 0) != header or os.fstat(descriptor).st_size != length:
            os.ftruncate(descriptor, 0)
            _write(descriptor, header + bytes(length - len(header)), 0)
        elif hasattr(os, "posix_fallocate"):
            # A process that writes to memory that the disk has no room for is killed.
            os.posix_fallocate(descriptor, 0, length)
        data = _open(self.path)
        try:
            if os.fstat(data).st_size != self.size:
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
    parts, end = [], 0
    for chunk in stream():
        part = chunk[max(0, start - end) : max(0, stop - end)]
        parts.append(part)
        end += len(chunk)
        if end >= stop:
            return b"".join(parts)
    raise StorageError(f"got {end} bytes, expected {stop}; the object has changed, open it again")


def _open(path: str | os.PathLike[str]) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`: a disk that is nearly full accepts only part of it at first."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


def _checksum(data: bytes) -> int:
    return zlib.crc32(data) or 1


T = TypeVar("T")

SPARE_SHARE = 64
"""When room is made, this share of the limit is left free, so that scans of the folder are rare."""
_USAGE = struct.Struct("<QQ")
_CHECKSUM_BYTES = 1 << 20


@dataclass(frozen=True)
class CachePolicy:
    """How the files of a cache are arranged, and what it says when it cannot write them.

    Args:
        entries: Yields the files of a folder that may be deleted to make room.
        beside: Returns the files that belong to one of these.
        is_in_use: Whether an entry must not be deleted now.
        has_holes: Whether files may have holes: their size is then the space they take on disk.
        usage: Name of the file in the folder that has the sum of all sizes, and is locked while
            room is made.
        warning: The message about a disk that cannot be written, and the remedy. Its two arguments
            are the folder and the reason.
    """

    entries: Callable[[Path], Iterable[Path]]
    warning: str
    beside: Callable[[Path], Iterable[Path]] = lambda path: ()
    is_in_use: Callable[[Path, os.stat_result], bool] = lambda path, status: False
    has_holes: bool = False
    usage: str = "usage"

    def warn(self, folder: object, error: Exception) -> None:
        """Warn once that a folder cannot be written."""
        reason = getattr(error, "strerror", None) or error
        warn_once(logger, f"{self.warning} {folder}", self.warning, folder, reason)


_SUFFIXES = (".map", ".lock", ".sum")
"""Suffixes of the files beside the content of an entry."""
COPIES = CachePolicy(
    entries=lambda folder: (each for each in folder.glob("??/*") if each.suffix not in _SUFFIXES),
    beside=lambda path: (Path(f"{path}{suffix}") for suffix in _SUFFIXES),
    has_holes=True,
    warning="disk cache %s takes no copies of remote files (%s), which are read from their stores "
    "instead. Free some space there, set ENERGON_STORAGE_CACHE_BYTES to less than the disk has, or "
    "ENERGON_STORAGE_CACHE_DIR to another folder",
)
"""The policy of copies of remote objects, named by digests."""


class DiskCache:
    """A folder of files that can be had again. May be used by many threads and processes.

    Args:
        folder: Where to store them; created if missing.
        max_bytes: Maximum disk space of all entries together; None for no limit.
        max_count: Maximum number of entries; None for no limit.
        policy: The arrangement of its files.

    Raises:
        ConfigError: If the folder cannot be created.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int | None,
        max_count: int | None = None,
        policy: CachePolicy = COPIES,
    ) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.max_count = max_count
        self.policy = policy
        self._open: WeakValueDictionary[Path, BlockFile] = WeakValueDictionary()
        self._lock = fork_safe_lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            if is_full(error):
                self.warn(error)
                return
            raise ConfigError(
                f"{folder}: cannot store copies of remote files here ({error.strerror}); set "
                "ENERGON_STORAGE_CACHE_DIR to a writable folder"
            ) from error

    def open(self, store: Store, key: str, *, version: str, size: int) -> BlockFile:
        """Return an object as a local file that fills as it is read.

        If it cannot be written to disk, every read goes to its store.

        Args:
            store: The store that has the object.
            key: Its key.
            version: Its version.
            size: Its size in bytes.
        """
        path = self._path(store.place(key), version)
        read = partial(store.read_range, key, version=version)
        whole = partial(store.stream, key, version=version, size=size)
        stream, count = None if store.gives_ranges else whole, store.statistics.add
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = BlockFile(
                    path,
                    size=size,
                    read=read,
                    stream=stream,
                    written=self._note,
                    failed=self.warn,
                    count=count,
                )
        touch(path)
        return file

    def keep(self, name: str, version: str, make: Callable[[], bytes]) -> Path | bytes:
        """Return the path of a local file that holds what `make` returns.

        `make` is called if the file is missing or damaged.

        Args:
            name: Identifies the content, for example an address without secrets.
            version: Differs whenever the content does.
            make: Called at most once, by one process at a time.

        Returns:
            The content itself if it cannot be written to disk.
        """
        path = self._path(name, version)
        content = None
        try:
            if not _is_whole(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with locked(path.with_name(f"{path.name}.lock")):
                    if not _is_whole(path):
                        content = make()
                        write_atomic(path, content)
                        _note_checksum(path, zlib.crc32(content))
                        self._note(len(content))
            touch(path)
            return path
        except OSError as error:
            if isinstance(error, EnergonError):
                raise
            self.warn(error)
        return make() if content is None else content

    def keep_for(self, address: str, info: ObjectInfo, make: Callable[[], bytes]) -> Path | bytes:
        """Store what belongs beside a file in a read-only place, see `keep`.

        Args:
            address: Where it would have been written.
            info: The file it is derived from; another version of that makes it stale.
            make: Returns the content.
        """
        name = redact(address) if is_remote(address) else os.path.abspath(local_path(address))
        return self.keep(name, f"{info.size}-{info.version or info.mtime_ns}", make)

    def load(
        self, name: str, version: str, make: Callable[[], bytes], parse: Callable[[Any], T]
    ) -> T:
        """Return `parse` of a cached content, see `keep`.

        Args:
            name: Identifies the content.
            version: Differs whenever the content does.
            make: Returns the content. Called again if the cached content cannot be parsed.
            parse: Called with the bytes, which are memory-mapped.

        Raises:
            FormatError: If `parse` raises it for what `make` has just returned.
        """
        kept = self.keep(name, version, make)
        if isinstance(kept, Path):
            with contextlib.suppress(FormatError, OSError):
                return parse(map_file(kept))
            self.discard(kept)
            kept = self.keep(name, version, make)
        return parse(map_file(kept) if isinstance(kept, Path) else kept)

    def discard(self, path: Path) -> None:
        """Delete an entry. Programs that have it open continue to read it."""
        for each in (path, *self.policy.beside(path)):
            each.unlink(missing_ok=True)

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[bool]:
        """Count a new entry of `size` bytes, after making room for it if necessary.

        Yields whether there is room: it may be too large, or the rest may be in use. The entry
        should have its size at the end of the block, so that a scan by another process counts it.
        """
        if self.max_bytes is None and self.max_count is None:
            yield True
            return
        with self.exclusive() as descriptor:
            content = os.pread(descriptor, _USAGE.size, 0)
            used = _Usage(*_USAGE.unpack(content)) if len(content) == _USAGE.size else None
            if used is None or self._is_beyond_limit(used.plus(size)):
                used = self._make_room(size)
            has_room = not self._is_beyond_limit(used.plus(size))
            os.pwrite(descriptor, _USAGE.pack(*used.plus(size)), 0)
            yield has_room

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[int]:
        """Keep other processes and threads from scanning the folder and making room.

        Yields a descriptor of the file with the sum of all sizes.
        """
        with FileLock(self.folder / self.policy.usage, permissions=0o600) as lock:
            try:
                lock.hold()
            except OSError as error:
                if not is_unsupported(error):
                    raise
            yield lock.descriptor

    def usage(self) -> tuple[int, int]:
        """Return the bytes and the number of all entries."""
        with self.exclusive():
            sizes = [entry.size for entry in self._entries()]
        return sum(sizes), len(sizes)

    def warn(self, error: Exception) -> None:
        """Warn once that the disk cannot be written."""
        self.policy.warn(self.folder, error)

    def _path(self, name: str, version: str) -> Path:
        digest = blake2b(os.fsencode(f"{name}\0{version}"), digest_size=16).hexdigest()
        return self.folder / digest[:2] / digest[2:]

    def _note(self, size: int) -> None:
        """Count bytes that were written, and make room if necessary."""
        with contextlib.suppress(OSError), self.reserve(size):
            pass

    def _is_beyond_limit(self, used: _Usage) -> bool:
        return (self.max_bytes is not None and used.size > self.max_bytes) or (
            self.max_count is not None and used.number > self.max_count
        )

    def _make_room(self, size: int) -> _Usage:
        """Delete the least recently used entries if a new one would not fit; return the rest."""
        entries = sorted(self._entries(), key=lambda entry: entry.used_at)
        used = _Usage(sum(entry.size for entry in entries), len(entries))
        if not self._is_beyond_limit(used.plus(size)):
            return used
        size += (self.max_bytes or 0) // SPARE_SHARE
        for entry in entries:
            if not entry.is_in_use:
                self.discard(entry.path)
                used = used.plus(-entry.size, -1)
                if not self._is_beyond_limit(used.plus(size)):
                    break
        return used

    def _entries(self) -> Iterator[_Entry]:
        for path in self.policy.entries(self.folder):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                size = status.st_blocks * 512 if self.policy.has_holes else status.st_size
                in_use = self.policy.is_in_use(path, status)
                yield _Entry(path, size, status.st_atime_ns, in_use)


class _Entry(NamedTuple):
    path: Path
    size: int
    used_at: int
    is_in_use: bool


class _Usage(NamedTuple):
    """The size and number of entries."""

    size: int
    number: int

    def plus(self, size: int, number: int = 1) -> _Usage:
        return _Usage(self.size + size, self.number + number)


def touch(path: Path) -> None:
    """Record that an entry was used, whether or not the file system tracks access times."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _note_checksum(path: Path, checksum: int) -> None:
    status = path.stat()
    write_atomic(f"{path}.sum", f"{status.st_size} {status.st_mtime_ns} {checksum}")


def _is_whole(path: Path) -> bool:
    """Return whether an entry is present and intact."""
    try:
        status = path.stat()
        size, mtime_ns, checksum = map(int, Path(f"{path}.sum").read_text().split())
    except (OSError, ValueError):
        return False
    is_whole = is_intact(path, size=size, mtime_ns=mtime_ns, checksum=checksum)
    if is_whole and status.st_mtime_ns != mtime_ns:
        _note_checksum(path, checksum)
    return is_whole


def is_intact(path: Path, *, size: Any, mtime_ns: Any, checksum: int | None) -> bool:
    """Return whether a file is as it was noted; if it was modified since, by its checksum.

    Args:
        path: The file.
        size: Its size as noted.
        mtime_ns: When it was written.
        checksum: The CRC-32 of its content; None if unknown.
    """
    status = path.stat()
    if status.st_size != size:
        return False
    if status.st_mtime_ns == mtime_ns or checksum is None:
        return True
    # Someone has written to it, or only copied it.
    crc32 = 0
    with open(path, "rb") as file:
        while data := file.read(_CHECKSUM_BYTES):
            crc32 = zlib.crc32(data, crc32)
    return crc32 == checksum


_cache: DiskCache | None = None
_cache_lock = fork_safe_lock()


def disk_cache() -> DiskCache:
    """Return the cache of this process, in the folder that the settings name."""
    global _cache
    settings = StorageSettings.from_environment()
    folder = settings.cache_dir or default_folder()
    with _cache_lock:
        if _cache is None or (_cache.folder, _cache.max_bytes) != (
            Path(folder),
            settings.cache_bytes,
        ):
            _cache = DiskCache(folder, max_bytes=settings.cache_bytes)
        return _cache


def _reset_after_fork() -> None:
    """Begin without the files of the parent."""
    global _cache
    _cache = None


os.register_at_fork(after_in_child=_reset_after_fork)


def default_folder() -> str:
    """Return the folder for the user's caches, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "energon")
