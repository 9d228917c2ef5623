"""Open shards at any address, compressed or not, at any position.

Compression (gzip, bzip2, xz, zstd) is detected from the first bytes. Where opening takes time, the
next shard is opened while the current one is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError, EnergonError, StateError
from energon.formats.compressed import HEAD_BYTES, Unpacked, compression_of
from energon.limits import TAR_PART_BYTES, UNPACKED_BYTES, Limit
from energon.webdataset.gopen import open_url, rewrite_url
from energon.webdataset.reading.shard_cache import ShardCache, ShardStream, nothing
from energon.webdataset.reading.urls import is_local, local_path

SKIP_BYTES = 1 << 20


def part_limit(stream: Any) -> Limit:
    """Return how large a part in a stream may be; compressed, it costs nothing to be huge."""
    return UNPACKED_BYTES if isinstance(stream, Unpacked) else TAR_PART_BYTES


@dataclass(frozen=True)
class ShardOpening:
    """How shards are opened.

    Args:
        allowed: What is allowed, see `security.resolve`.
        cache: Stores copies of remote shards; None for no cache.
    """

    allowed: frozenset[str] = frozenset()
    cache: ShardCache | None = None

    def open(self, shard: Any, *, position: int = 0) -> ShardStream:
        """Open an item of a shard list.

        Args:
            shard: An address, or a dict with `url` and optionally `local_path` or an open `stream`.
            position: Where to begin, in decompressed bytes.
        """
        opened = self.open_packed(shard)
        self.unpack(opened)
        if position:
            _skip(opened, position)
        return opened

    def unpack(self, opened: ShardStream) -> None:
        """Make a shard that was opened as stored yield decompressed bytes."""
        opened.head = _read(opened.stream, HEAD_BYTES)
        compression = compression_of(opened.head)
        if compression is not None:
            opened.stream = Unpacked(
                opened.stream, compression, head=opened.head, origin=opened.url
            )
            opened.head = b""

    def open_packed(self, shard: Any) -> ShardStream:
        """Open a shard as stored, from its beginning."""
        shard = {"url": shard} if isinstance(shard, str) else shard
        if not isinstance(shard, dict) or "url" not in shard:
            raise ConfigError(
                f"got {str(shard)[:200]!r} where a shard should be: an address, or a dict with a "
                "url; is a stage that reads shards, such as tarfile_to_samples, in the wrong place?"
            )
        url, path = shard["url"], shard.get("local_path")
        if "stream" in shard:
            completed = shard.get("completed", nothing)
            return ShardStream(url, shard["stream"], local_path=path, completed=completed)
        path = path or local_path(rewrite_url(url))
        if path is None and self.cache is not None:
            return self.cache.open(url, lambda: open_url(url, allowed=self.allowed))
        return ShardStream(url, open_url(path or url, allowed=self.allowed), local_path=path)


def _read(stream: Any, size: int) -> bytes:
    """Return `size` bytes; fewer only at the end."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _skip(opened: ShardStream, position: int) -> None:
    """Skip to a position in decompressed bytes."""
    stream: Any = opened.stream
    passed, opened.head = len(opened.head), b""
    if hasattr(stream, "seekable") and stream.seekable():
        stream.seek(position)
        return
    while passed < position:
        more = len(stream.read(min(position - passed, SKIP_BYTES)) or b"")
        if not more:
            raise StateError(
                f"{opened.url}: ends at byte {passed}, before the saved position {position}; has "
                "it changed since?"
            )
        passed += more


END_SECONDS = 1.0
"""How long to wait for a command to exit after it was told to."""

_END = object()


class OpeningAhead(Iterator[Any]):
    """Opens the next shard early, since servers and commands take time to start.

    Local files are not opened early, and sources of them are not read ahead: they may remove a
    file as soon as the next one is requested.

    Args:
        shards: Items as `ShardOpening.open` accepts them.
        opening: How they are opened.
    """

    def __init__(self, shards: Iterator[Any], opening: ShardOpening) -> None:
        self._shards = shards
        self._opening = opening
        self._next: Any = None
        self._failure: Exception | None = None
        self._begun: _Begun | None = None

    def __next__(self) -> Any:
        if self._failure is not None:
            raise self._failure
        shard, self._next = self._next, None
        shard = next(self._shards) if shard is None else shard
        if shard is _END:
            raise StopIteration
        return shard

    def open(self, shard: Any, *, position: int = 0) -> ShardStream:
        """Open the shard that was yielded last, or wait until it is open; start opening the next.

        Args:
            shard: The shard.
            position: Where to begin, in decompressed bytes.
        """
        begun, self._begun = self._begun, None
        opened = self._opening.open(shard, position=position) if begun is None else begun.result()
        if not _is_local(shard):
            self._look_ahead()
        return opened

    def close(self) -> None:
        """Close a shard that was opened early."""
        if self._begun is not None:
            self._begun.leave()
            self._begun = None

    def _look_ahead(self) -> None:
        try:
            self._next = next(self._shards, _END)
        except Exception as error:
            # The error concerns the next shard, and the current one must be yielded first.
            self._failure = error
            return
        if self._next is not _END and not _is_local(self._next):
            self._begun = _Begun(self._opening, self._next)


class _Begun:
    """A shard that is being opened by a thread.

    Args:
        opening: How to open it.
        shard: The shard.
    """

    def __init__(self, opening: ShardOpening, shard: Any) -> None:
        self._opened: Future[ShardStream] = Future()
        self._stream: Any = None
        self._is_left = False
        # A daemon: waiting for a server that never answers must not keep the program from exiting.
        self._thread = threading.Thread(target=self._open, args=(opening, shard), daemon=True)
        self._thread.start()

    def result(self) -> ShardStream:
        """Wait until the shard is open, and return it."""
        return self._opened.result()

    def leave(self) -> None:
        """Close the shard, now or as soon as it is open."""
        self._is_left = True
        if hasattr(self._stream, "terminate"):
            self._stream.terminate()
            self._thread.join(END_SECONDS)
        self._opened.add_done_callback(_close)

    def _open(self, opening: ShardOpening, shard: Any) -> None:
        try:
            opened = opening.open_packed(shard)
            self._stream = opened.stream
            if not self._is_left:
                opening.unpack(opened)
            self._opened.set_result(opened)
        except BaseException as error:
            if self._stream is not None:
                with contextlib.suppress(EnergonError, OSError):
                    self._stream.close()
            self._opened.set_exception(error)


def _is_local(shard: Any) -> bool:
    url = shard.get("url") if isinstance(shard, dict) else shard
    if isinstance(shard, dict) and "stream" in shard:
        return True
    return not isinstance(url, str) or is_local(url) or url == "-"


def _close(opened: Future[ShardStream]) -> None:
    if opened.exception() is None:
        opened.result().stream.close()
