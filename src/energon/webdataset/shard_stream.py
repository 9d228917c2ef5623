"""Open a shard to read from: whatever its address, compressed or not, from any position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from energon.errors import ConfigError, StateError
from energon.webdataset.compression import HEAD_BYTES, Unpacked, unpacker_for
from energon.webdataset.gopen import gopen
from energon.webdataset.tar_reader import ByteStream

SKIP_BYTES = 1 << 20


@dataclass
class ShardStream:
    """An open shard.

    Args:
        url: Its address, as it is listed.
        stream: Its bytes after `head`, unpacked.
        head: The first of them, if they were looked at.
        local_path: Where it is on disk, if that is known.
    """

    url: str
    stream: ByteStream
    head: bytes = b""
    local_path: str | None = None


def open_shard(shard: Any, *, position: int = 0) -> ShardStream:
    """Open what an item of a shard list stands for.

    Args:
        shard: An address, or a dict with `url` and maybe `local_path` or an open `stream`.
        position: Where to begin, in unpacked bytes.
    """
    shard = {"url": shard} if isinstance(shard, str) else shard
    if not isinstance(shard, dict) or "url" not in shard:
        raise ConfigError(
            f"got {shard!r} where a shard should be: an address, or a dict with a url; is a stage "
            "that opens tar files there twice, or in the wrong place?"
        )
    url, local_path = shard["url"], shard.get("local_path")
    stream = shard["stream"] if "stream" in shard else gopen(local_path or url)
    head = _read(stream, HEAD_BYTES)
    make = unpacker_for(head)
    if make is not None:
        stream, head = Unpacked(stream, head, make, origin=url), b""
    if position:
        _skip(stream, position, head, url)
        head = b""
    return ShardStream(url, stream, head, local_path)


def _read(stream: Any, size: int) -> bytes:
    """Return `size` bytes; fewer only at the end."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _skip(stream: Any, position: int, head: bytes, url: str) -> None:
    if hasattr(stream, "seekable") and stream.seekable():
        stream.seek(position)
        return
    missing = position - len(head)
    while missing > 0:
        passed = len(stream.read(min(missing, SKIP_BYTES)) or b"")
        if not passed:
            raise StateError(f"{url}: ends before byte {position}, the saved position")
        missing -= passed
