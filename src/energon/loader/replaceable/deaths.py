"""The deaths of a worker: how it ended, how often it died where, and what to do next."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

SampleAddress = tuple[int, int]
"""Lane and row."""


MAX_SKIPPED = 16
"""How many rows may be skipped before the next batch arrives."""

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0


class Ending(NamedTuple):
    """How a worker ended.

    Args:
        cause: In words, as the predicate of a sentence.
        was_killed: Whether it was killed from outside, so that another one may survive.
    """

    cause: str
    was_killed: bool


class Verdict(Enum):
    """What to do after a death."""

    RETRY = "retry"
    SKIP = "skip"
    GIVE_UP = "give up"


@dataclass
class DeathRecord:
    """The deaths of one worker and its successors.

    After `max_deaths` deaths at the same row, the row is skipped. Crashes elsewhere (while
    starting, between samples, or in a hook that gets several) end the run after the same number in
    a row. If no batch arrives in between, four times that number of crashes at ever-changing rows
    end the run as well, and so does skipping more than `MAX_SKIPPED` rows: something else is
    killing the workers then.

    A worker that is killed from outside may survive next time: such deaths end the run once no
    batch has arrived for `patience_seconds`.

    Args:
        max_deaths: How often a worker may die at the same row.
        patience_seconds: How long to keep starting workers that are killed before their first
            batch.
        clock: Returns the time in seconds.
    """

    max_deaths: int
    patience_seconds: float
    clock: Callable[[], float] = time.monotonic
    in_a_row: int = 0
    """Deaths since the last batch."""
    _at: Counter[SampleAddress] = field(default_factory=Counter)
    _first: float = 0.0
    _elsewhere: int = 0
    _since_skip: int = 0
    _skipped: int = 0

    def died(self, address: SampleAddress | None, *, killed: bool = False) -> Verdict:
        """Count a death.

        Args:
            address: The sample being worked on; None if it was not a single one.
            killed: Whether it was killed from outside.
        """
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._first = self.clock()
        if address is not None:
            self._at[address] += 1
            if self._at[address] >= self.max_deaths:
                self._since_skip = 0
                self._skipped += 1
                return Verdict.SKIP if self._skipped <= MAX_SKIPPED else Verdict.GIVE_UP
        if killed:
            given_up = self.seconds >= self.patience_seconds
        elif address is None:
            self._elsewhere += 1
            given_up = self._elsewhere >= self.max_deaths
        else:
            self._since_skip += 1
            given_up = self._since_skip >= 4 * self.max_deaths
        return Verdict.GIVE_UP if given_up else Verdict.RETRY

    @property
    def seconds(self) -> float:
        """How long ago the first death after the last batch was."""
        return self.clock() - self._first if self.in_a_row else 0.0

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start: no time at first, then longer each time."""
        if self.in_a_row < 2:
            return 0.0
        return float(min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self.in_a_row - 2, 30)))

    def delivered(self) -> None:
        """Record that a batch has arrived."""
        self.in_a_row = self._elsewhere = self._since_skip = self._skipped = 0


def describe_exit_code(code: int | None) -> str:
    """Return how a process ended, in words."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (the system does this when memory runs out)"
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
