"""Whether a request to a store is made again, and what is said meanwhile.

A store fails for all of its requests at the same time, and of all processes. So what is logged is
about the store: the first repetition at once, then one line in a while, until it answers again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from energon.errors import (
    StorageAccessError,
    StorageError,
    StorageTimeoutError,
)
from energon.io.settings import PREFIX, StorageSettings
from energon.messages import counted, warn_every

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
