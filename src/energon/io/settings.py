"""How stores are asked: settings from the environment, and when a request is retried.

The settings are the same in every process of a job.

A store usually fails for all of its requests at once, in every process. So the log is about the
store: its first retry at once, then one line every `SAY_SECONDS` until it answers again.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from energon.errors import (
    ConfigError,
    ObjectChangedError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from energon.io.backends.base import NotNeededError, request_is_needed
from energon.io.threads import fork_safe_lock
from energon.messages import counted, warn_every

AISTORE_PROVIDERS = {"ais": "ais", "s3": "aws", "gs": "gcp", "az": "azure"}
"""The schemes of buckets that AIStore serves, with its names for their stores."""
SETTING_PREFIX = "ENERGON_STORAGE_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?")
_UNITS = {
    **{"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    **{"ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}
_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def goes_to_aistore(scheme: str) -> bool:
    """Return whether the environment sends a scheme to AIStore."""
    return scheme in AISTORE_PROVIDERS and scheme in os.environ.get("USE_AIS_FOR", "").split(":")


@dataclass(frozen=True)
class StorageSettings:
    """Limits for reading from stores.

    Each can be set in the environment, as in `ENERGON_STORAGE_ATTEMPTS=3` or
    `ENERGON_STORAGE_CACHE_BYTES=200GB`.

    Args:
        attempts: Maximum number of attempts of a request, including the first; None for as many
            as the deadline allows.
        first_wait_seconds: Longest wait before the second attempt; it doubles from one attempt to
            the next. The actual wait is drawn uniformly from zero to that, so that clients do not
            retry in step.
        longest_wait_seconds: Upper limit of the doubling.
        deadline_seconds: Longest time for a request including all retries. While an object is
            streamed, every MiB may take this long.
        refused_seconds: How long to try a server that has never answered and refuses connections
            or does not accept any, to which there is no route, or whose name cannot be resolved.
        hedge_after_seconds: Send a read request a second time if it is not answered within this
            time, and take the first answer; None never does.
        parallel_requests: Maximum number of read-ahead requests of one process to one store at
            the same time.
        read_ahead_bytes: Maximum bytes of remote shards that a process holds fetched but unused.
        cache_shards: Whether to keep what is read of remote shards in the cache folder, so that
            the next epoch or job reads it from disk.
        cache_dir: Folder for copies of remote files; None for one below the user's cache.
        cache_bytes: Maximum size of that folder.
    """

    attempts: int | None = None
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 20.0
    deadline_seconds: float = 300.0
    refused_seconds: float = 10.0
    hedge_after_seconds: float | None = None
    parallel_requests: int = 16
    read_ahead_bytes: int = 256 << 20
    cache_shards: bool = False
    cache_dir: str | None = None
    cache_bytes: int = 20 << 30

    def __post_init__(self) -> None:
        hedge = self.hedge_after_seconds
        if (self.attempts is not None and self.attempts < 1) or self.parallel_requests < 1:
            raise ConfigError(f"{self}: expected at least one attempt and one request")
        if min(self.deadline_seconds, self.refused_seconds) <= 0 or (
            hedge is not None and hedge <= 0
        ):
            raise ConfigError(f"{self}: expected times above 0")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> StorageSettings:
        """Return the settings from the environment, with defaults for the rest.

        Raises:
            ConfigError: If a value is invalid.
        """
        variables = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = SETTING_PREFIX + field.name.upper()
            if text := variables.get(name):
                values[field.name] = _parse(name, str(field.type), text)
        return cls(**values)


def parse_bytes(text: str) -> int:
    """Return the number of bytes written as "4096", "200GB" or "1.5GiB".

    Raises:
        ConfigError: If it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r}: expected a size such as 4096, 200GB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        if name.endswith("_BYTES"):
            return parse_bytes(text)
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind.startswith("int"):
            return int(text)
        return float(text) if kind.startswith("float") else text
    except KeyError:
        raise ConfigError(f"{name}={text!r}: expected 1 or 0") from None
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected a number ({error})") from error


logger = logging.getLogger("energon")

SAY_SECONDS = 10.0
"""Seconds between log lines about a store in trouble."""
STEP_SECONDS = 1.0
"""How often a waiting request checks whether another line is due."""
CALM_SECONDS = 30.0
"""After this long without a failure, the next one starts a new episode."""
STALL_SECONDS = 10.0
"""A request that takes longer is counted as stalled."""
RENEW_SECONDS = 60.0
"""Least time between two look-ups of refused credentials."""

_random = random.SystemRandom()


class StoreStatistics:
    """Counters of one store in this process. May be used by many threads.

    Names: requests, bytes_read, bytes_written, seconds (total time of requests), retries, stalls
    (requests that took more than 10 s), hedged (requests made twice because the first was slow),
    changed (objects that were replaced), failed (requests given up), cache_hits, cache_misses and
    cache_failed (ranges found on local disk, not found, and impossible to store there), and
    `error: …` for every kind of failure.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._lock = fork_safe_lock()

    def add(self, **counts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    @contextmanager
    def failure(self, error: BaseException) -> Iterator[None]:
        """Count a failure, and whether the block gives up by raising an error or waits to retry."""
        self.add(**{f"error: {type(error).__name__}": 1})
        if isinstance(error, ObjectChangedError):
            self.add(changed=1)
        try:
            yield
        except StorageError:
            self.add(failed=1)
            raise
        self.add(retries=1)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request, and how long it takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._counts["requests"] += 1
                self._counts["stalls"] += seconds > STALL_SECONDS
                self._seconds += seconds

    def snapshot(self) -> dict[str, float]:
        """Return all counters."""
        with self._lock:
            return {**self._counts, "seconds": round(self._seconds, 6)}


class _PendingRequest(NamedTuple):
    """A request that is not answered yet."""

    address: str
    begun: float
    is_needed: Callable[[], bool] | None


class Retries:
    """Decides whether the requests to one store are retried. May be used by many threads.

    Args:
        origin: Address of the store, without secrets.
        settings: Number and duration of retries.
        renew: Looks up the credentials again; None if the store has none.
        sleep: Called to wait, with seconds.
    """

    def __init__(
        self,
        origin: str,
        settings: StorageSettings,
        renew: Callable[[], None] | None,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_denied = False
        """Whether the store refuses even freshly looked-up credentials."""
        self.statistics = StoreStatistics()
        self._origin = origin
        self._settings = settings
        self._renew_credentials = renew
        self._sleep = sleep
        self._lock = fork_safe_lock()
        self._renewed_at = -RENEW_SECONDS
        self._failures = 0
        self._began = self._last = self._answered_at = 0.0
        self._unreachable_since: float | None = None
        self._was_found = False
        self._under_way: dict[object, _PendingRequest] = {}
        self._watcher: threading.Thread | None = None

    def answered(self) -> None:
        """Record that the store has answered as it should."""
        self._was_found = True
        if not (self._failures or self.is_denied):
            return
        with self._lock:
            self.is_denied = False
            self._unreachable_since = None
            now = self._answered_at = time.monotonic()
            if self._failures and self._is_calm():
                warn_every(
                    SAY_SECONDS,
                    logger,
                    f"answers of {self._origin}",
                    "%s answers again, after %s in %.0f s",
                    self._origin,
                    counted(self._failures, "failed attempt"),
                    now - self._began,
                )
                self._failures = 0

    def failed(
        self, error: StorageError, *, asked_at: float, begun: float, attempts: int, seconds: float
    ) -> None:
        """Wait until a request may be retried.

        Args:
            error: What the last attempt failed with.
            asked_at: When the last attempt was made.
            begun: When the first attempt was made, later if some of the time since does not count.
            attempts: How many attempts were made.
            seconds: How long all attempts together may take.

        Raises:
            StorageError: If it is not retried.
            NotNeededError: If its result is no longer needed.
        """
        with self.statistics.failure(error):
            is_needed = request_is_needed()
            if is_needed is not None and not is_needed():
                raise NotNeededError from error
            self._refuse_lasting(error, asked_at)
            self._note(error, asked_at)
            pause = self._pause(error, begun, attempts, seconds)
            self._say(error, begun, seconds)
            while pause > 0:
                self._sleep(min(pause, STEP_SECONDS))
                pause -= STEP_SECONDS
                if is_needed is not None and not is_needed():
                    raise NotNeededError from error
                if self._is_calm():
                    return  # a trainer may be waiting for this request
                if pause > 0:
                    self._say(error, begun, seconds)

    def _refuse_lasting(self, error: StorageError, asked_at: float) -> None:
        """Raise an error that another attempt would meet again, even with new credentials."""
        if error.transient:
            return
        if not isinstance(error, StorageAccessError):
            raise error
        if not self._renew(asked_at):
            self.is_denied = True
            if self._renew_credentials is None:
                raise error
            raise StorageAccessError(
                f"{error}. They were looked up again and refused again; read-ahead stops until the "
                "store accepts some"
            ) from error

    def _pause(self, error: StorageError, begun: float, attempts: int, seconds: float) -> float:
        """Return how long to wait before the next attempt; raise if that would be too late."""
        settings, now = self._settings, time.monotonic()
        longest = settings.longest_wait_seconds
        # A server that has answered before is likely to come back, others need another address.
        is_lost = error.unreachable and not self._was_found
        if is_lost:
            longest = min(longest, settings.refused_seconds / 5)
        doubled = settings.first_wait_seconds * 2.0 ** min(attempts - 1, 60)
        pause = _random.uniform(0.0, min(longest, doubled))
        gives_up = now + pause - begun > seconds
        if settings.attempts is not None:
            gives_up |= attempts >= settings.attempts
        if is_lost and self._unreachable_since is not None:
            gives_up |= now + pause - self._unreachable_since > settings.refused_seconds
        if gives_up:
            raise StorageTimeoutError(
                f"{error}; gave up after {counted(attempts, 'attempt')} in {now - begun:.1f} s. "
                f"{self._advice(error)}"
            ) from error
        return pause

    @contextmanager
    def watching(self, address: str) -> Iterator[None]:
        """Log from time to time that the request in the block is not answered."""
        request = object()
        with self._lock:
            self._under_way[request] = _PendingRequest(
                address, time.monotonic(), request_is_needed()
            )
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(
                    target=self._watch, name="energon storage", daemon=True
                )
                self._watcher.start()
        try:
            yield
        finally:
            del self._under_way[request]

    def _watch(self) -> None:
        while True:
            time.sleep(SAY_SECONDS / 2)
            with self._lock:
                requests = list(self._under_way.values())
                if not requests:
                    self._watcher = None
                    return
            needed = [each for each in requests if each.is_needed is None or each.is_needed()]
            if not needed:
                continue
            address, begun, _ = min(needed, key=lambda each: each.begun)
            if (waited := time.monotonic() - begun) >= SAY_SECONDS:
                warn_every(
                    SAY_SECONDS,
                    logger,
                    f"wait for {self._origin}",
                    "%s: no answer yet after %.0f s",
                    address,
                    waited,
                    delays_batches=True,
                )

    def _note(self, error: StorageError, asked_at: float) -> None:
        """Count a failure in the present episode, or start a new one."""
        with self._lock:
            now = time.monotonic()
            if not self._failures or now - self._last > CALM_SECONDS:
                self._failures, self._began, self._unreachable_since = 0, now, None
            self._failures += 1
            self._last = now
            if not error.unreachable:
                self._unreachable_since = None
            elif self._unreachable_since is None:
                self._unreachable_since = asked_at

    def _is_calm(self) -> bool:
        """Return whether the store answers again.

        While some requests fail and others do not, it is the same episode.
        """
        now = time.monotonic()
        return self._answered_at > self._last and now - self._last > SAY_SECONDS / 2

    def _say(self, error: StorageError, begun: float, seconds: float) -> None:
        now = time.monotonic()
        if error.unreachable and not self._was_found:
            name, limit = "REFUSED_SECONDS", min(seconds, self._settings.refused_seconds)
        else:
            name, limit = "DEADLINE_SECONDS", seconds
        warn_every(
            SAY_SECONDS,
            logger,
            f"trouble with {self._origin}",
            "%s; retrying: %s in %.0f s; this request: %.1f s of at most %g s (%s%s)",
            error,
            counted(self._failures, "failed attempt"),
            now - self._began,
            now - begun,
            limit,
            SETTING_PREFIX,
            name,
            delays_batches=True,
        )

    def _advice(self, error: StorageError) -> str:
        settings = self._settings
        if error.unreachable and not self._was_found:
            return (
                "Check the address and the endpoint, that the server is running, and that this "
                f"machine can reach it. {SETTING_PREFIX}REFUSED_SECONDS="
                f"{settings.refused_seconds:g} sets how long a server that has "
                f"never answered is tried{self._how_often()}"
            )
        return (
            "Is the store reachable, and can it serve this many requests? "
            f"{SETTING_PREFIX}PARALLEL_REQUESTS={settings.parallel_requests} sets how many run at "
            "once, "
            f"{SETTING_PREFIX}DEADLINE_SECONDS={settings.deadline_seconds:g} how long each is tried"
            f"{self._how_often()}"
        )

    def _how_often(self) -> str:
        attempts = self._settings.attempts
        return "" if attempts is None else f", {SETTING_PREFIX}ATTEMPTS={attempts} how often"

    def _renew(self, asked_at: float) -> bool:
        """Look up the credentials again; return whether they may differ from those of a request.

        They are not looked up again within `RENEW_SECONDS`.

        Args:
            asked_at: When the request was made.
        """
        if self._renew_credentials is None:
            return False
        with self._lock:
            now = time.monotonic()
            if asked_at < self._renewed_at:
                return True  # by another thread, meanwhile
            if now - self._renewed_at < RENEW_SECONDS:
                return False
            # Requests that are made from now on wait for this.
            self._renew_credentials()
            self._renewed_at = time.monotonic()
        return True
