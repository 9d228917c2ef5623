"""The contract of a backend: the few operations that energon needs of a kind of storage.

A backend makes each request once, within `seconds_left`, and reports what went wrong; `Store` adds
what every kind has in common: retries, deadlines, hedging, statistics. To add a scheme, write a
backend and name it in `files.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

INDEX_AGAIN = "or run `energon prepare` again if the dataset was prepared with it"
"""Advice to end a message with: only other libraries can write the indexes of their datasets."""
_here = threading.local()
# A fork does not continue the requests of its parent.
os.register_at_fork(after_in_child=lambda: _here.__dict__.clear())


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Limit the total time of the requests that this thread makes in the block."""
    before = getattr(_here, "deadline", None)
    _here.deadline = time.monotonic() + seconds
    try:
        yield
    finally:
        _here.deadline = before


def seconds_left(seconds: float) -> float:
    """Return how long a backend may wait for an answer: `seconds`, or less near the time limit."""
    deadline = getattr(_here, "deadline", None)
    return seconds if deadline is None else max(0.0, min(seconds, deadline - time.monotonic()))


class NotNeededError(BaseException):
    """Raised instead of retrying a request that is no longer needed.

    It is not an error of a sample, so hooks and their error handlers do not catch it.
    """


@contextmanager
def while_needed(is_needed: Callable[[], bool] | None) -> Iterator[None]:
    """Let requests that are made in the block be retried only while they are needed.

    Those of this thread, and of threads of ours that work for it.

    Args:
        is_needed: Called by any thread that makes or waits for such a request; None if they are
            needed in any case.
    """
    before = request_is_needed()
    _here.is_needed = is_needed
    try:
        yield
    finally:
        _here.is_needed = before


def request_is_needed() -> Callable[[], bool] | None:
    """Return the function that tests whether requests of this thread are needed."""
    is_needed: Callable[[], bool] | None = getattr(_here, "is_needed", None)
    return is_needed


class ObjectInfo(NamedTuple):
    """What is known of an object without reading it."""

    key: str
    size: int
    """In bytes; -1 if unknown, as with streams."""
    version: str | None = None
    """Differs whenever the content does (an ETag); None if the storage has no versions."""
    mtime_ns: int = 0
    """Time of the last write in nanoseconds since 1970; 0 if unknown."""


class Backend(Protocol):
    """Objects below a root, by key. May be used by many threads.

    All methods raise `DatasetNotFoundError` for an object that does not exist,
    `StorageAccessError` for credentials that are refused, `ObjectChangedError` for an object of
    another version than requested, and `StorageError` with `transient` for what may be retried.
    """

    origin: str
    """The root for messages, without secrets."""
    can_range: bool
    """Whether it supports ranges. If not, only `stream` from 0 works."""
    can_list: bool
    """Whether it supports listing, as web servers do not."""

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        """Return bytes `start` to `stop`, fewer only where the object ends."""

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        """Yield the bytes from `start` to the end, in chunks."""

    def head(self, key: str) -> ObjectInfo:
        """Return size, version and time of an object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects below the folder `prefix`, in any order; nothing if there is none."""

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        """Write an object atomically. A path names a file to upload."""

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
