"""Files read by range, local or remote: ranges fetched ahead of their use, and shown as files.

Code that knows the order passes spans of what comes next to the buffer of the process, where reads
of remote files find them. Ranges that were not planned are fetched on demand: the buffer affects
speed, never results. Remote objects are read from beginning to end, or in small pieces when looking
for headers.
"""

from __future__ import annotations

import io
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from weakref import ref

import numpy as np

from energon.arrays import Ints
from energon.errors import (
    DatasetNotFoundError,
    ObjectChangedError,
    RangesNotSupportedError,
    TruncatedError,
)
from energon.io.address import is_remote, redact
from energon.io.backends.base import (
    INDEX_AGAIN,
    NotNeededError,
    ObjectInfo,
    request_is_needed,
    while_needed,
)
from energon.io.backends.local import OpenFile, cut_off
from energon.io.files import open_store
from energon.io.settings import STEP_SECONDS
from energon.io.store import Store
from energon.io.threads import fork_safe_lock

if TYPE_CHECKING:
    from energon.io.disk_cache import BlockFile

COALESCED_BYTES = 8 << 20
"""Maximum size of a request. Several requests at once are faster than one long one."""
COALESCED_GAP_BYTES = 128 << 10
"""Gap between two needed ranges that is fetched along: as fast as another request."""


KEPT_BLOCK_BYTES = 1 << 20
"""Ranges to keep are fetched in multiples of this."""

Identity = tuple[str, str, str, int]


class RemoteObject:
    """A version of an object in a store. May be used by many threads.

    Args:
        store: The store that has it.
        info: Its key, size and version.
    """

    def __init__(self, store: Store, info: ObjectInfo) -> None:
        self.store = store
        self.info = info
        self.identity = (store.origin, info.key, info.version or str(id(self)), info.size)
        """Identifies this version of the object, also after it is opened again."""
        self._is_gone = False
        self._copy: BlockFile | None = None
        if store.settings.cache_shards or not store.gives_ranges:
            self._copy = self._open_copy()

    def read(self, start: int, stop: int) -> bytes:
        """Return a range from the store, or from the copy on disk if shards are cached.

        Raises:
            EnergonError: See `Store.read_range`.
        """
        if self._copy is None:
            try:
                data = self.store.read_range(self.info.key, start, stop, version=self.info.version)
                self._is_gone = False
                return data
            except RangesNotSupportedError:
                self._copy = self._open_copy()
        if stop > self.info.size:
            raise TruncatedError(
                f"{self.store.place(self.info.key)}: has {self.info.size} bytes, expected those "
                f"up to {stop}; the object is truncated or changed since it was indexed, restore "
                f"it, {INDEX_AGAIN}"
            )
        return self._copy.read(start, stop)

    def read_ahead(self, start: int, stop: int) -> bytes:
        """Fetch a range that is not needed yet, and give up early if that cannot succeed.

        Raises:
            CancelledError: If the store refuses credentials, or the object is gone.
            EnergonError: See `Store.read_range`.
        """
        if self._is_gone or self.store.retries.is_denied:
            raise CancelledError
        try:
            return self.read(start, stop)
        except (DatasetNotFoundError, ObjectChangedError):
            self._is_gone = True
            raise

    def _open_copy(self) -> BlockFile:
        from energon.io.disk_cache import disk_cache  # for objects that are kept only

        key, size, version, _ = self.info
        # Without a version, a copy is of no use to anybody else.
        version = version or os.urandom(16).hex()
        return disk_cache().open(self.store, key, size=size, version=version)


class Merged(NamedTuple):
    """Ranges that were joined, ascending."""

    start: Ints
    stop: Ints
    owner: Ints
    """For each input range, the index of the merged range that contains it."""


def merge_ranges(
    start: Ints, stop: Ints, *, gap: int = COALESCED_GAP_BYTES, largest: int = COALESCED_BYTES
) -> Merged:
    """Merge ranges that overlap or are at most `gap` bytes apart.

    Merged ranges longer than `largest` are divided evenly, but never within an input range.

    Example:
        >>> merged = merge_ranges(np.array([90, 0, 10]), np.array([99, 10, 20]), gap=5)
        >>> merged.start.tolist(), merged.stop.tolist(), merged.owner.tolist()
        ([0, 90], [20, 99], [1, 0, 0])
    """
    if not len(start):
        return Merged(start, stop, start)
    order = np.argsort(start, kind="stable")
    low, high = start[order], np.maximum.accumulate(stop[order])
    begins = np.concatenate(([True], low[1:] - high[:-1] > gap))
    edges = np.flatnonzero(begins)
    size = np.maximum.reduceat(high, edges) - low[edges]
    if size.max() > largest:
        owner = np.cumsum(begins) - 1
        count = -(-size // largest)
        piece = (low - low[edges][owner]) * count[owner] // np.maximum(1, size[owner])
        begins[1:] |= piece[1:] != piece[:-1]
        edges = np.flatnonzero(begins)
    owner = np.empty(len(start), np.int64)
    owner[order] = np.cumsum(begins) - 1
    return Merged(low[edges], np.maximum.reduceat(stop[order], edges), owner)


class Span:
    """A range of an object that is fetched as a whole.

    Args:
        object_: The object.
        start: First byte.
        stop: The byte after the last.
    """

    __slots__ = ("future", "is_dropped", "object", "start", "stop")

    def __init__(self, object_: RemoteObject, start: int, stop: int) -> None:
        self.object = object_
        self.start = start
        self.stop = stop
        self.future: Future[bytes] | None = None
        self.is_dropped = False

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.stop - self.start

    @property
    def has_failed(self) -> bool:
        """Whether fetching failed or was cancelled."""
        future = self.future
        if future is None or not future.done():
            return False
        return future.cancelled() or future.exception() is not None

    def wait(self) -> bytes | None:
        """Wait for its bytes and return them; None if they are not being fetched.

        Raises:
            EnergonError: If it could not be fetched, see `Store.read_range`.
            NotNeededError: If this thread no longer needs them.
        """
        future, is_needed = self.future, request_is_needed()
        if future is None:
            return None
        while is_needed is not None and not wait([future], STEP_SECONDS).done:
            if not is_needed():
                raise NotNeededError
        try:
            return future.result()
        except (CancelledError, NotNeededError):  # others no longer need it, but this thread does
            return None

    def pieces(self) -> list[Span]:
        """Return it in pieces of at most one request each."""
        count = max(1, -(-self.size // COALESCED_BYTES))
        edges = [self.start + self.size * piece // count for piece in range(count + 1)]
        return [Span(self.object, low, high) for low, high in pairwise(edges)]


class SpanBuffer:
    """Spans being fetched or already fetched, by object. May be used by many threads."""

    def __init__(self) -> None:
        self._spans: defaultdict[Identity, list[Span]] = defaultdict(list)
        self._kept: set[tuple[Identity, int]] = set()
        self._left: deque[tuple[list[Span], bool]] = deque()
        self._lock = fork_safe_lock()
        self.kept_bytes = 0
        """Spans that are never dropped, since they are read again and again."""

    def fetch(self, span: Span) -> None:
        """Start fetching a span. It stays until it is dropped."""
        read, is_needed = span.object.read_ahead, request_is_needed()
        with while_needed(lambda: not span.is_dropped and (is_needed is None or is_needed())):
            span.future = span.object.store.submit(read, span.start, span.stop, ahead=True)
        with self._lock:
            self._drop_left()
            self._spans[span.object.identity].append(span)

    def keep(self, object_: RemoteObject, start: int, stop: int, *, most: int) -> bool:
        """Start fetching the missing blocks of a range, and keep them.

        Args:
            object_: The object.
            start: First byte.
            stop: The byte after the last.
            most: How many bytes may be kept in total; return False if that is not enough.
        """
        identity, size = object_.identity, object_.info.size
        first, last = start // KEPT_BLOCK_BYTES, -(-min(stop, size) // KEPT_BLOCK_BYTES)
        with self._lock:
            missing = [n for n in range(first, last) if (identity, n) not in self._kept]
            if self.kept_bytes + len(missing) * KEPT_BLOCK_BYTES > most:
                return False
            self._kept.update((identity, n) for n in missing)
        runs: list[list[int]] = []
        for n in missing:
            if runs and runs[-1][1] == n and n - runs[-1][0] < COALESCED_BYTES // KEPT_BLOCK_BYTES:
                runs[-1][1] = n + 1
            else:
                runs.append([n, n + 1])
        for begin, end in runs:
            span = Span(object_, begin * KEPT_BLOCK_BYTES, min(size, end * KEPT_BLOCK_BYTES))
            self.kept_bytes += span.size
            self.fetch(span)
        return True

    def leave(self, spans: list[Span], *, is_last: bool) -> None:
        """Forget the spans of a reader that no longer exists; with the last one also what is kept.

        Garbage may be collected anywhere, even where the lock is held, or in a fork, which has none
        of the threads that fetch the spans of its parent. The spans are then forgotten later.
        """
        if self is not _buffer:
            return
        self._left.append((spans, is_last))
        if self._lock.acquire(blocking=False):
            try:
                self._drop_left()
            finally:
                self._lock.release()

    def _drop_left(self) -> None:
        """Forget the spans of readers that no longer exist. The lock is held."""
        while self._left:
            spans, is_last = self._left.popleft()
            self._drop(spans)
            if is_last:
                self._forget()

    def _forget(self, *, failed: bool = False) -> None:
        """Forget what was kept; with `failed`, only what could not be fetched. The lock is held."""
        for span in [span for held in self._spans.values() for span in held]:
            if not failed or span.has_failed:
                self._forget_kept(span)

    def _forget_kept(self, span: Span | None) -> None:
        """Forget a span that was to be kept, so that it is fetched on demand. The lock is held."""
        if span is None:
            return
        blocks = range(span.start // KEPT_BLOCK_BYTES, -(-span.stop // KEPT_BLOCK_BYTES))
        if (span.object.identity, blocks.start) in self._kept:
            self._kept.difference_update((span.object.identity, n) for n in blocks)
            self.kept_bytes -= span.size
            self._drop([span])

    def drop(self, spans: Iterable[Span]) -> None:
        """Forget spans, and cancel those not yet being fetched."""
        with self._lock:
            self._drop(spans)

    def _drop(self, spans: Iterable[Span]) -> None:
        for span in spans:
            identity = span.object.identity
            held = self._spans[identity]
            if span in held:
                held.remove(span)
            if not held:
                del self._spans[identity]
            span.is_dropped = True
            if span.future is not None:
                span.future.cancel()

    def find(self, object_: RemoteObject, start: int, stop: int) -> bytes | None:
        """Return a range if spans cover it, waiting for those being fetched; else None.

        Raises:
            EnergonError: If a span could not be fetched, see `Store.read_range`.
        """
        with self._lock:
            spans = list(self._spans.get(object_.identity, ()))
        parts: list[bytes] = []
        while start < stop:
            span = next((span for span in spans if span.start <= start < span.stop), None)
            try:
                data = None if span is None else span.wait()
            except BaseException:
                with self._lock:
                    self._forget_kept(span)
                    self._forget(failed=True)
                raise
            if span is None or data is None:
                with self._lock:
                    self._forget_kept(span)
                return None
            end = min(stop, span.stop)
            parts.append(data[start - span.start : end - span.start])
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)


def read_ranges(object_: RemoteObject, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
    """Return ranges of an object, from the buffer or by a few parallel requests.

    Raises:
        EnergonError: If one cannot be read, see `Store.read_range`.
    """
    buffer = span_buffer()
    pieces = [buffer.find(object_, a, b) for a, b in zip(starts, stops, strict=True)]
    missing = [index for index, data in enumerate(pieces) if data is None]
    if missing:
        low = np.array([starts[index] for index in missing], np.int64)
        high = np.array([stops[index] for index in missing], np.int64)
        for index, data in zip(missing, _fetch(object_, low, high), strict=True):
            pieces[index] = data
    return [data for data in pieces if data is not None]


def _fetch(object_: RemoteObject, start: Ints, stop: Ints) -> list[bytes]:
    """Request ranges of an object: neighbors together, long ones in pieces."""
    merged = merge_ranges(start, stop)
    pieces = [
        Span(object_, low, high).pieces()
        for low, high in zip(merged.start.tolist(), merged.stop.tolist(), strict=True)
    ]
    requests = [(piece.start, piece.stop) for span in pieces for piece in span]
    answers = iter(object_.store.together(object_.read, requests))
    whole = [b"".join(next(answers) for _ in span) for span in pieces]
    return [
        whole[owner][low - base : high - base]
        for owner, base, low, high in zip(
            merged.owner.tolist(),
            merged.start[merged.owner].tolist(),
            start.tolist(),
            stop.tolist(),
            strict=True,
        )
    ]


_buffer = SpanBuffer()


def span_buffer() -> SpanBuffer:
    """Return the buffer of this process."""
    return _buffer


def _reset_after_fork() -> None:
    global _buffer
    _buffer = SpanBuffer()


os.register_at_fork(after_in_child=_reset_after_fork)


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
            at = offset - self._piece_start
            data = self._piece[at : at + stop - offset] if at >= 0 else b""
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

    def _is_far(self, offset: int, stop: int) -> bool:
        """Return whether requesting this piece alone is faster than fetching all up to it."""
        if offset // COPIED_CHUNK_BYTES in self._chunks or stop - offset > SMALL_READ_BYTES:
            return False
        return self._skips

    @property
    def _skips(self) -> bool:
        return self._gap_bytes > self._wait_seconds * self._bytes_per_second

    def _fetch_piece(self, offset: int, stop: int) -> None:
        end = min(max(stop, offset + SMALL_READ_BYTES), self.object.info.size)
        start = time.perf_counter()
        self._piece, self._piece_start = self.object.read(offset, end), offset
        seconds = time.perf_counter() - start
        if self._measured < 2:
            self._wait_seconds = min(self._wait_seconds or seconds, seconds)
        else:
            self._wait_seconds = _mixed(self._wait_seconds, seconds)
        self._measured += 1

    def _fetch_chunk(self, offset: int) -> None:
        self._until_probe -= 1
        number = offset // COPIED_CHUNK_BYTES
        following = number + (1 if self._skips else CHUNKS_AHEAD)
        self._forget(keep=range(number, number + CHUNKS_AHEAD))
        last = min(-(-self.object.info.size // COPIED_CHUNK_BYTES), following)
        reader, is_needed = ref(self), request_is_needed()
        with while_needed(lambda: reader() is not None and (is_needed is None or is_needed())):
            for ahead in range(number, last):
                if ahead not in self._chunks:
                    self._chunks[ahead] = self.object.store.submit(_chunk, self.object, ahead)
        together = len(self._chunks)
        self._piece, seconds = self._chunks.pop(number).result()
        self._piece_start = number * COPIED_CHUNK_BYTES
        rate = together * len(self._piece) / max(seconds, 1e-6)
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
