"""An open shard: its bytes, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from energon.formats.tar.stream import ByteStream


def nothing() -> None:
    """Do nothing."""


@dataclass
class ShardStream:
    """An open shard.

    Args:
        url: Its address, as it is listed.
        stream: Its bytes after `head`, unpacked.
        head: The first of them, if they were looked at.
        local_path: Where it is on disk, if that is known.
        completed: Called when it was read to its end, and found to be whole.
    """

    url: str
    stream: ByteStream
    head: bytes = b""
    local_path: str | None = None
    completed: Callable[[], None] = nothing
