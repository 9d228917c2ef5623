"""An object read from beginning to end, requested again from where an answer breaks off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from energon.errors import StorageError, TruncatedError
from energon.io.backends.base import time_limit
from energon.io.store import SLOW_BYTES_PER_SECOND, Store

PROGRESS_BYTES = 1 << 20
"""Progress that renews the deadline: a server may send a byte at a time."""


class ObjectStream:
    """Reads one version of an object in order. Only real progress gives the store more time.

    Args:
        store: The store that has it.
        key: Its key.
        start: First byte.
        size: Its size; -1 if the server does not say.
        version: The version required; None for any.
        waited: Seconds that were spent on it before.

    Raises:
        TruncatedError: If it ends before `start`.
    """

    def __init__(
        self, store: Store, key: str, start: int, size: int, version: str | None, waited: float
    ) -> None:
        if 0 <= size < start:
            raise TruncatedError(
                f"{store.place(key)}: ends at byte {size}, before byte {start}; the object is "
                "truncated or changed"
            )
        self._store = store
        self._key = key
        self._size = size
        self._version = version
        self._position = self._mark = start
        self._waited = waited
        self._asked_at = 0.0
        self._failures = 0

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes.

        Raises:
            StorageError: If the rest cannot be read after all retries.
        """
        while self._position < self._size or self._size < 0:
            try:
                yield from self._answer()
                self._check_end()
                self._store.retries.answered()
                return
            except StorageError as error:
                self._wait(error)

    def _answer(self) -> Iterator[bytes]:
        """Request the rest, and yield what arrives of it."""
        store = self._store
        store.statistics.add(requests=1)
        allowed = store.settings.deadline_seconds - self._waited
        allowed += max(0, self._size - self._position) / SLOW_BYTES_PER_SECOND
        chunks = iter(store.backend.stream(self._key, self._position, self._version))
        following = partial(store.in_time, partial(next, chunks, None), self._key, allowed)
        self._asked_at = time.monotonic()
        with time_limit(allowed):
            chunk = following()
        while chunk is not None:
            self._record(len(chunk))
            yield chunk
            self._asked_at = time.monotonic()
            chunk = following()

    def _record(self, num_bytes: int) -> None:
        self._waited += time.monotonic() - self._asked_at
        self._store.statistics.add(bytes_read=num_bytes)
        self._position += num_bytes
        self._check_length()
        if self._position - self._mark >= PROGRESS_BYTES:
            self._waited, self._mark, self._failures = 0.0, self._position, 0

    def _wait(self, error: StorageError) -> None:
        """Wait until the rest may be requested again, or raise."""
        store = self._store
        if not store.gives_ranges and self._position:
            raise error
        self._failures += 1
        store.learn_from(error)
        store.retries.failed(
            error,
            asked_at=self._asked_at,
            begun=self._asked_at - self._waited,
            attempts=self._failures,
            seconds=store.settings.deadline_seconds,
        )
        self._waited += time.monotonic() - self._asked_at

    def _check_length(self) -> None:
        if 0 <= self._size < self._position:
            raise StorageError(
                f"{self._store.place(self._key)}: the answer has {self._position} bytes or more, "
                f"expected {self._size}; does a proxy compress it?"
            )

    def _check_end(self) -> None:
        if self._position < self._size:
            raise StorageError(
                f"{self._store.place(self._key)}: the answer ended at byte {self._position} of "
                f"{self._size}",
                transient=True,
            )
