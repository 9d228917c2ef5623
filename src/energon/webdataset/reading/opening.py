"""Open a shard to read from: whatever its address, compressed or not, from any position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError, StateError
from energon.webdataset.gopen import open_url
from energon.webdataset.reading.compression import HEAD_BYTES, Unpacked, unpacker_for
from energon.webdataset.reading.rewriting import rewrite_url
from energon.webdataset.reading.shard_cache import ShardCache
from energon.webdataset.reading.shard_stream import ShardStream, nothing
from energon.webdataset.reading.urls import local_path

SKIP_BYTES = 1 << 20


@dataclass(frozen=True)
class Opening:
    """How shards are opened.

    Args:
        allowed: What is allowed, see `security.resolve`.
        cache: Keeps shards that are not local; None means no cache.
    """

    allowed: frozenset[str] = frozenset()
    cache: ShardCache | None = None

    def open(self, shard: Any, *, position: int = 0) -> ShardStream:
        """Open what an item of a shard list stands for.

        Args:
            shard: An address, or a dict with `url` and maybe `local_path` or an open `stream`.
            position: Where to begin, in unpacked bytes.
        """
        opened = self.open_packed(shard)
        self.unpack(opened)
        if position:
            _skip(opened, position)
        return opened

    def unpack(self, opened: ShardStream) -> None:
        """Let a shard that was opened as it is stored give its unpacked bytes."""
        opened.head = _read(opened.stream, HEAD_BYTES)
        make = unpacker_for(opened.head)
        if make is not None:
            opened.stream = Unpacked(opened.stream, opened.head, make, origin=opened.url)
            opened.head = b""

    def open_packed(self, shard: Any) -> ShardStream:
        """Open a shard as it is stored, from its beginning."""
        shard = {"url": shard} if isinstance(shard, str) else shard
        if not isinstance(shard, dict) or "url" not in shard:
            raise ConfigError(
                f"got {str(shard)[:200]!r} where a shard should be: an address, or a dict with a "
                "url; are samples made of shards twice, or in the wrong place?"
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
    """Go to a position in unpacked bytes."""
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
