"""Count what is asked of each store, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import perf_counter


class StoreStatistics:
    """Counters of one store in this process. May be used by many threads.

    Names: requests, bytes_read, bytes_written, seconds (of requests, all together), retries,
    hedged (requests made twice because the first was slow), changed (objects that were
    replaced), failed (requests given up), and `error: …` for every kind of failure.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._lock = Lock()

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def add_error(self, error: BaseException) -> None:
        """Count a failure under the name of its kind."""
        with self._lock:
            self._counts[f"error: {type(error).__name__}"] += 1

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, and how long it takes."""
        start = perf_counter()
        try:
            yield
        finally:
            taken = perf_counter() - start
            with self._lock:
                self._counts["requests"] += 1
                self._seconds += taken

    def snapshot(self) -> dict[str, float]:
        """Return all counters."""
        with self._lock:
            return {**self._counts, "seconds": round(self._seconds, 6)}
