"""The contract of a backend: the few things that energon asks of a place where bytes are.

A backend makes each request once, within `seconds_left`, and says what went wrong; `Store` adds
all that is the same for every place: retries, deadlines, hedging, statistics. To add a scheme,
write a backend and name it in `files.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

_here = threading.local()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Let the requests that this thread makes in the block take so long together, at most."""
    before = getattr(_here, "deadline", None)
    _here.deadline = time.monotonic() + seconds
    try:
        yield
    finally:
        _here.deadline = before


def seconds_left(seconds: float) -> float:
    """Return for how long a backend may wait for an answer: `seconds`, or until the time limit."""
    deadline = getattr(_here, "deadline", None)
    return seconds if deadline is None else max(0.0, min(seconds, deadline - time.monotonic()))


class ObjectInfo(NamedTuple):
    """What a place says of an object without giving its content."""

    key: str
    size: int
    """In bytes; -1 if unknown, as for a stream."""
    version: str | None = None
    """Differs whenever the content does (an ETag); None if the place has no such thing."""
    mtime_ns: int = 0
    """When it was written, in nanoseconds since 1970; 0 if unknown."""


class Backend(Protocol):
    """Objects below a root, by key. May be used by many threads.

    All methods raise `DatasetNotFoundError` for an object that does not exist,
    `StorageAccessError` for credentials that do not do, `ObjectChangedError` for an object of
    another version than wanted, and `StorageError` with `transient` for what may be tried again.
    """

    origin: str
    """The root for messages, without secrets."""
    can_range: bool
    """Whether it serves parts of objects. If not, only `stream` from 0 works."""
    can_list: bool
    """Whether it can say what it has, as web servers cannot."""

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        """Return bytes `start` to `stop`, fewer only where the object ends."""

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        """Yield the bytes from `start` to the end, in chunks."""

    def head(self, key: str) -> ObjectInfo:
        """Return what there is to say of an object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below the folder `prefix`, in any order; nothing if there is none."""

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        """Write an object, so that others see all of it or none. A path is a file to upload."""

    def delete(self, key: str) -> None:
        """Delete an object. That it does not exist is not an error."""
