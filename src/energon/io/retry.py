"""When to try again, and for how long."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields

from energon.errors import ConfigError

_PREFIX = "ENERGON_STORAGE_"
_random = random.SystemRandom()


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long a request is tried. None means no limit or never.

    Every field can be set in the environment: `ENERGON_STORAGE_ATTEMPTS=3`.

    Args:
        attempts: Requests in all, the first included.
        first_wait_seconds: Longest wait before the second; doubles from one to the next. The
            actual wait is drawn evenly from zero to that, so that clients do not come at once.
        longest_wait_seconds: Where doubling ends.
        deadline_seconds: After that much time, no further request is made.
        hedge_after_seconds: A reading request that is not answered after this time is made a
            second time, and the first answer counts; None never does.
    """

    attempts: int = 10
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 20.0
    deadline_seconds: float = 300.0
    hedge_after_seconds: float | None = None

    def __post_init__(self) -> None:
        hedge = self.hedge_after_seconds
        if self.attempts < 1 or self.deadline_seconds <= 0 or (hedge is not None and hedge <= 0):
            raise ConfigError(f"{self}: wanted is at least one attempt, and times above 0")

    def wait_seconds(self, retry: int) -> float:
        """Return how long to wait before retry number `retry`, from 0."""
        limit = min(self.longest_wait_seconds, self.first_wait_seconds * 2.0**retry)
        return _random.uniform(0.0, limit)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> RetryPolicy:
        """Return the policy that the environment asks for.

        Raises:
            ConfigError: If a value is no number.
        """
        found = os.environ if environment is None else environment
        values: dict[str, float | int] = {}
        for field in fields(cls):
            name = _PREFIX + field.name.upper()
            if text := found.get(name):
                try:
                    values[field.name] = int(text) if field.name == "attempts" else float(text)
                except ValueError as error:
                    raise ConfigError(f"{name}={text!r}: wanted is a number") from error
        return cls(**values)  # type: ignore[arg-type]
