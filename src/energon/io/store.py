"""Objects below one root, read and written reliably.

A backend makes each request once. A store retries it with growing, random waits until a deadline,
sends it twice if the answer is slow (hedging, off by default), checks that the answer is complete,
resumes it where it broke off, and counts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from energon.errors import (
    RangesNotSupportedError,
    StorageError,
    StorageTimeoutError,
    TruncatedError,
)
from energon.io.backends.base import (
    INDEX_AGAIN,
    Backend,
    ObjectInfo,
    seconds_left,
    time_limit,
)
from energon.io.settings import Retries, StorageSettings
from energon.io.threads import WaitingThreads, fork_safe_lock, results_of

T = TypeVar("T")

MAX_PARALLEL_REQUESTS = 32
"""Maximum number of parallel requests for data needed now."""
SLOW_BYTES_PER_SECOND = 100_000
"""Average speed below which an object is requested, or written, again."""


class Store:
    """Objects below one root. May be used by many threads, but not pickled: pickle addresses.

    Args:
        backend: Makes the requests.
        settings: Limits on parallel requests and retries.
    """

    def __init__(self, backend: Backend, settings: StorageSettings | None = None) -> None:
        self.backend = backend
        self.settings = StorageSettings() if settings is None else settings
        self.gives_ranges = backend.can_range
        self._pools: dict[str, WaitingThreads] = {}
        self._lock = fork_safe_lock()
        self.retries = Retries(self.origin, self.settings, getattr(backend, "renew", None))
        self.statistics = self.retries.statistics

    @property
    def origin(self) -> str:
        """The root, without secrets."""
        return self.backend.origin

    def place(self, key: str) -> str:
        """Return the address of an object, without secrets."""
        return f"{self.origin.rstrip('/')}/{key}"

    def info(self, key: str) -> ObjectInfo:
        """Return size and version of an object.

        Raises:
            DatasetNotFoundError: If there is none.
            StorageError: If the request fails.
        """
        return self._try(lambda: self.backend.head(key), key)

    def read(self, key: str, *, most: int | None = None) -> bytes:
        """Return a whole object, with one request.

        Args:
            key: Its key.
            most: How many bytes are needed; of a larger object a few more are returned, not all.
        """
        begun, seconds = time.monotonic(), self.settings.deadline_seconds / 2
        try:
            data = self._try(
                lambda: _joined(self.backend.stream(key, 0, None), most), key, seconds=seconds
            )
        except StorageTimeoutError:
            if time.monotonic() - begun < seconds / 2:
                raise
            # A large or distant object is streamed: then only progress has to be in time.
            return _joined(self.stream(key, waited=seconds), most)
        self.statistics.add(bytes_read=len(data))
        return data

    def read_range(self, key: str, start: int, stop: int, *, version: str | None = None) -> bytes:
        """Return exactly the bytes `start` to `stop` of an object.

        Args:
            key: Its key.
            start: First byte.
            stop: The byte after the last.
            version: The version required; None for any.

        Raises:
            DatasetNotFoundError: If there is no such object.
            TruncatedError: If it ends before `stop`.
            ObjectChangedError: If it has another version.
            StorageError: If it cannot be read after all retries.
        """
        data = self._try(lambda: self._get(key, start, stop, version), key, hedged=True)
        self.statistics.add(bytes_read=len(data))
        return data

    def together(self, ask: Callable[..., T], items: Sequence[tuple[Any, ...]]) -> list[T]:
        """Return `ask(*item)` for each item, called in parallel."""
        if len(items) < 2:
            return [ask(*item) for item in items]
        return results_of([self.submit(ask, *item) for item in items])

    def submit(self, ask: Callable[..., T], *arguments: Any, ahead: bool = False) -> Future[T]:
        """Call `ask(*arguments)` in a thread of the store.

        Calls with `ahead` never delay those without.
        """
        if ahead:
            pool = self._threads("energon-ahead", self.settings.parallel_requests)
        else:
            pool = self._threads("energon-read", MAX_PARALLEL_REQUESTS)
        return pool.submit(ask, *arguments)

    def stream(
        self,
        key: str,
        start: int = 0,
        *,
        version: str | None = None,
        size: int | None = None,
        waited: float = 0.0,
    ) -> Iterator[bytes]:
        """Yield an object in chunks from byte `start`, resuming if the stream breaks off.

        Args:
            key: Its key.
            start: First byte.
            version: The version required; None for any, but the same from beginning to end.
            size: Its size in bytes if known; None requests it.
            waited: Seconds that were spent on it before.

        Raises:
            ObjectChangedError: If it was replaced before the end was reached.
            TruncatedError: If it ends before the size that the store reported.
        """
        if size is None:
            seconds = self.settings.deadline_seconds - waited
            try:
                info = self._try(lambda: self.backend.head(key), key, seconds=seconds)
                size, version = info.size, version or (info.version if self.gives_ranges else None)
            except StorageError:
                if self.gives_ranges:
                    raise
                size = -1  # the server does not say
        yield from ObjectStream(self, key, start, size, version, waited).chunks()

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects below the folder `prefix`, sorted by key.

        Raises:
            StorageError: If the place does not support listing, as web servers do not.
        """
        self._check_lists(prefix)
        return self._try(lambda: sorted(self.backend.list(prefix)), prefix)

    def first(self, prefix: str = "", most: int = 10_000) -> Sequence[ObjectInfo]:
        """Return the first objects below the folder `prefix`; there may be millions.

        Args:
            prefix: The folder.
            most: Maximum number of objects.

        Raises:
            StorageError: If the place does not support listing, as web servers do not.
        """
        self._check_lists(prefix)
        return self._try(lambda: [*islice(self.backend.list(prefix), most)], prefix)

    def has_any(self, prefix: str = "") -> bool:
        """Return whether there is an object below the folder `prefix`; see `first`."""
        return bool(self.first(prefix, 1))

    def names_in(self, prefix: str = "") -> Sequence[str]:
        """Return the names of files and folders directly in the folder `prefix`, sorted.

        Only the first objects below it are looked at, see `first`.
        """
        cut = len(prefix) + 1 if prefix else 0
        return sorted({info.key[cut:].partition("/")[0] for info in self.first(prefix)})

    def _check_lists(self, prefix: str) -> None:
        if not self.backend.can_list:
            raise StorageError(
                f"{self.place(prefix)}: web servers do not list their files; name the files, or "
                "use the address of the object store behind it"
            )

    def write(self, key: str, content: bytes | os.PathLike[str]) -> None:
        """Write an object atomically: until it is complete, readers see the old one or none.

        Args:
            key: Its key.
            content: Bytes, or a file on this machine.
        """
        size = len(content) if isinstance(content, bytes) else os.path.getsize(content)
        seconds = self.settings.deadline_seconds + size / SLOW_BYTES_PER_SECOND
        self._try(lambda: self.backend.put(key, content), key, seconds=seconds)
        self.statistics.add(bytes_written=size)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        self._try(lambda: self.backend.delete(key), key)

    def _threads(self, name: str, count: int) -> WaitingThreads:
        with self._lock:
            if name not in self._pools:
                self._pools[name] = WaitingThreads(count, name)
            return self._pools[name]

    def _get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        data = self.backend.get(key, start, stop, version)
        if len(data) == stop - start:
            return data
        size = self.backend.head(key).size
        if size >= stop and not data:
            raise RangesNotSupportedError(
                f"{self.place(key)}: the server refuses ranges of its {size} bytes"
            )
        if size < stop:
            raise TruncatedError(
                f"{self.place(key)}: ends at byte {size}, expected {stop - start} bytes from byte "
                f"{start}; the object is truncated or changed since it was indexed, restore it, "
                f"{INDEX_AGAIN}"
            )
        raise StorageError(
            f"{self.place(key)}: got {len(data)} bytes from byte {start}, expected {stop - start}",
            transient=True,
        )

    def _try(
        self,
        request: Callable[[], T],
        key: str,
        *,
        hedged: bool = False,
        seconds: float | None = None,
    ) -> T:
        """Retry a request until it succeeds, for `seconds`; None for the deadline's."""
        seconds = self.settings.deadline_seconds if seconds is None else seconds
        hedge_after = self.settings.hedge_after_seconds if hedged else None
        begun = time.monotonic()
        failures = 0
        while True:
            asked_at = time.monotonic()
            remaining = seconds - (asked_at - begun)
            try:
                with time_limit(remaining), self.retries.watching(self.place(key)):
                    if hedge_after is not None:
                        answer = self._hedge(request, hedge_after)
                    else:
                        with self.statistics.request():
                            answer = self.in_time(request, key, remaining)
            except StorageError as error:
                failures += 1
                self.learn_from(error)
                self.retries.failed(
                    error, asked_at=asked_at, begun=begun, attempts=failures, seconds=seconds
                )
            else:
                self.retries.answered()
                return answer

    def in_time(self, request: Callable[[], T], key: str, seconds: float) -> T:
        """Make a request that ends in time, even through a library without time limits."""
        if not getattr(self.backend, "may_hang", False):
            return request()
        future = self._threads("energon-wait", 2 * MAX_PARALLEL_REQUESTS).submit(request)
        if not wait([future], max(1.0, seconds)).done:
            raise StorageError(f"{self.place(key)}: no answer in time", transient=True)
        return future.result()

    def learn_from(self, error: StorageError) -> None:
        """Record what a failure says about the store."""
        if isinstance(error, RangesNotSupportedError):
            self.gives_ranges = False

    def _hedge(self, request: Callable[[], T], after_seconds: float) -> T:
        """Make a request, and again if it is slow; return the first good answer."""
        pool = self._threads("energon-hedge", 2 * MAX_PARALLEL_REQUESTS)
        remaining = seconds_left(self.settings.deadline_seconds)

        def run() -> T:
            with self.statistics.request(), time_limit(remaining):
                return request()

        first = pool.submit(run)
        done, _ = wait([first], after_seconds)
        if done:
            return first.result()
        self.statistics.add(hedged=1)
        second = pool.submit(run)
        done, _ = wait([first, second], return_when=FIRST_COMPLETED)
        good = [future for future in done if future.exception() is None]
        if good or len(done) == 2:
            return (good or [first])[0].result()
        return (second if first in done else first).result()


def _joined(chunks: Iterator[bytes], most: int | None) -> bytes:
    """Return chunks joined, ending with the first that exceeds `most` bytes."""
    kept: list[bytes] = []
    size = 0
    for chunk in chunks:
        kept.append(chunk)
        size += len(chunk)
        if most is not None and size > most:
            break
    return b"".join(kept)


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
                if self._position < self._size:
                    raise StorageError(
                        f"{self._store.place(self._key)}: the answer ended at byte "
                        f"{self._position} of {self._size}",
                        transient=True,
                    )
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
        if 0 <= self._size < self._position:
            raise StorageError(
                f"{self._store.place(self._key)}: the answer has {self._position} bytes or more, "
                f"expected {self._size}; does a proxy compress it?"
            )
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
