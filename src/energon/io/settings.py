"""How stores are read: settings from the environment, and when a request is made again.

They are set in the environment so that every process of a job has the same.

A store fails for all of its requests at the same time, and of all processes. So what is logged is
about the store: the first repetition at once, then one line in a while, until it answers again.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from energon.errors import (
    ConfigError,
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from energon.messages import counted, warn_every

PREFIX = "ENERGON_STORAGE_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?")
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY_UNITS = {"ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class StorageSettings:
    """Limits for reading from stores. None means no limit, or never.

    Each can be set in the environment, as in `ENERGON_STORAGE_ATTEMPTS=3` or
    `ENERGON_STORAGE_CACHE_BYTES=200GB`.

    Args:
        attempts: Times that a request is made in all, the first included.
        first_wait_seconds: Longest wait before the second time; doubles from one to the next.
            The actual wait is drawn evenly from zero to that, so that clients do not come at
            once.
        longest_wait_seconds: Where doubling ends.
        deadline_seconds: Longest time for a request with all its repetitions. Of an object that is
            streamed, every MiB may take that long.
        refused_seconds: Longest time that connections are tried which are refused, as they are
            where no server runs.
        hedge_after_seconds: A reading request that is not answered after this time is made a
            second time, and the first answer counts; None never does.
        parallel_requests: Requests of one process to one store at the same time, when it reads
            ahead.
        read_ahead_bytes: What a process holds of remote shards at most, fetched but not used
            up.
        cache_shards: Whether what is read of remote shards is kept there, too, so that the next
            epoch or job reads it from disk.
        cache_dir: Folder for copies of remote files; None for one below the user's cache.
        cache_bytes: What that folder holds at most.
    """

    attempts: int = 10
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
        if self.attempts < 1 or self.parallel_requests < 1:
            raise ConfigError(f"{self}: expected at least one attempt and one request")
        if min(self.deadline_seconds, self.refused_seconds) <= 0 or (
            hedge is not None and hedge <= 0
        ):
            raise ConfigError(f"{self}: expected times above 0")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> StorageSettings:
        """Return what the environment says, and the defaults for the rest.

        Raises:
            ConfigError: If a value is invalid.
        """
        found = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if text := found.get(name):
                values[field.name] = _parse(name, str(field.type), text)
        return cls(**values)


def parse_bytes(text: str) -> int:
    """Return a number of bytes, as written in "4096", "200GB" or "1.5GiB".

    Raises:
        ConfigError: If it is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r}: expected a size, as 4096, 200GB or 1.5GiB")
    unit = found[2]
    return int(float(found[1]) * (_UNITS | _BINARY_UNITS).get(unit or "", 1))


def _parse(name: str, kind: str, text: str) -> Any:
    try:
        if name.endswith("_BYTES"):
            return parse_bytes(text)
        if kind == "bool":
            return text.lower() in ("1", "true", "yes", "on")
        if kind.startswith("int"):
            return int(text)
        return float(text) if kind.startswith("float") else text
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected a number ({error})") from error


logger = logging.getLogger("energon")

SAY_SECONDS = 10.0
"""While a store is in trouble, it is said every so many seconds."""
STEP_SECONDS = 1.0
"""Whoever waits looks so often whether it is time to say so again."""
CALM_SECONDS = 30.0
"""Without a failure for so long, the next one begins another episode."""
RENEW_SECONDS = 60.0
"""Refused credentials are looked up again at most this often."""

_random = random.SystemRandom()


class Retries:
    """Decides for all requests to one store whether they are made again. Used by many threads.

    Args:
        origin: The store, as it may be shown to anybody.
        settings: How often and for how long.
        renew: Looks up credentials again; None if the store has none.
        sleep: Waits.
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
        """Whether the store has refused credentials that were looked up again, ever since."""
        self._origin = origin
        self._settings = settings
        self._renew_credentials = renew
        self._sleep = sleep
        self._lock = threading.Lock()
        self._renewed_at = -RENEW_SECONDS
        self._failures = 0
        self._began = self._last = 0.0
        self._refused_since: float | None = None

    def answered(self) -> None:
        """Note that the store has answered as it should."""
        if not (self._failures or self.is_denied):
            return
        with self._lock:
            self.is_denied = False
            self._refused_since = None
            now = time.monotonic()
            # While some requests fail and others do not, it is the same episode.
            if self._failures and now - self._last > SAY_SECONDS / 2:
                logger.warning(
                    "%s answers again, after %s in %.0f s",
                    self._origin,
                    counted(self._failures, "failed attempt"),
                    now - self._began,
                )
                self._failures = 0

    def failed(
        self, error: StorageError, *, asked_at: float, begun: float, attempts: int, seconds: float
    ) -> None:
        """Wait until a request may be made again.

        Args:
            error: What it failed with.
            asked_at: When it was made for the last time.
            begun: When it was made first, or should have been with the time that counts.
            attempts: How often it was made.
            seconds: How long it may take in all.

        Raises:
            StorageError: If it is not made again.
        """
        if isinstance(error, StorageAccessError) and not error.transient:
            if not self._renew(asked_at):
                self.is_denied = True
                raise _denied(error) from error
        elif not error.transient:
            raise error
        self._note(error)
        settings, now = self._settings, time.monotonic()
        longest = settings.longest_wait_seconds
        if error.refused:
            longest = min(longest, settings.refused_seconds / 5)
        pause = _random.uniform(0.0, min(longest, settings.first_wait_seconds * 2**attempts / 2))
        gives_up = attempts >= settings.attempts or now + pause - begun > seconds
        if error.refused and self._refused_since is not None:
            gives_up |= now + pause - self._refused_since > settings.refused_seconds
        if gives_up:
            raise StorageTimeoutError(
                f"{error}; gave up after {counted(attempts, 'attempt')} in {now - begun:.1f} s. "
                f"{self._advice(error)}"
            ) from error
        self._say(error, begun, seconds)
        while pause > 0:
            self._sleep(min(pause, STEP_SECONDS))
            pause -= STEP_SECONDS
            if pause > 0:
                self._say(error, begun, seconds)

    def waited(self, place: str, seconds: float) -> None:
        """Say that someone has waited so long for what was asked for and is not answered."""
        warn_every(
            SAY_SECONDS,
            logger,
            f"wait for {self._origin}",
            "%s: no answer yet; the samples in it have been waited for for %.0f s",
            place,
            seconds,
        )

    def _note(self, error: StorageError) -> None:
        """Count a failure of the present episode, or of a new one."""
        with self._lock:
            now = time.monotonic()
            if not self._failures or now - self._last > CALM_SECONDS:
                self._failures, self._began, self._refused_since = 0, now, None
            self._failures += 1
            self._last = now
            if not error.refused:
                self._refused_since = None
            elif self._refused_since is None:
                self._refused_since = now

    def _say(self, error: StorageError, begun: float, seconds: float) -> None:
        now = time.monotonic()
        if error.refused:
            name, limit = "REFUSED_SECONDS", min(seconds, self._settings.refused_seconds)
        else:
            name, limit = "DEADLINE_SECONDS", seconds
        warn_every(
            SAY_SECONDS,
            logger,
            f"trouble with {self._origin}",
            "%s; trying again: %s in %.0f s, this request has waited for %.1f s of at most %g s "
            "(%s%s)",
            error,
            counted(self._failures, "failed attempt"),
            now - self._began,
            now - begun,
            limit,
            PREFIX,
            name,
        )

    def _advice(self, error: StorageError) -> str:
        settings = self._settings
        if error.refused:
            return (
                f"Nothing listens there; is the address right, and the server running? "
                f"{PREFIX}REFUSED_SECONDS={settings.refused_seconds:g} sets for how long refused "
                f"connections are tried again, {PREFIX}ATTEMPTS={settings.attempts} how often"
            )
        return (
            "Is the store reachable and able to serve so many requests? "
            f"{PREFIX}PARALLEL_REQUESTS={settings.parallel_requests} sets how many at a time, "
            f"{PREFIX}ATTEMPTS={settings.attempts} how often one is made, "
            f"{PREFIX}DEADLINE_SECONDS={settings.deadline_seconds:g} for how long"
        )

    def _renew(self, asked_at: float) -> bool:
        """Return whether there may be other credentials than those of a request.

        They are looked up again, unless that was done just now.

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


def _denied(error: StorageAccessError) -> StorageAccessError:
    """Return the error for credentials that are refused in spite of a second look."""
    return StorageAccessError(
        f"{error}. They were looked up again, and refused again; nothing more is read ahead until "
        "the store accepts some"
    )
