"""What to do about a worker that has died: try again, leave a row out, or give up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

Address = tuple[int, int]
"""Lane and row."""


MAX_SKIPPED = 16
"""How many rows may be left out before the next batch arrives."""

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 10.0


class Verdict(Enum):
    """What follows from a death."""

    RETRY = "retry"
    SKIP = "skip"
    GIVE_UP = "give up"


@dataclass
class DeathRecord:
    """The deaths of one worker and its successors.

    A row that has seen `max_deaths` of them is left out. Crashes elsewhere (while starting,
    between samples, or in a hook that gets several) end the run after as many in a row. Without
    one batch in between, so do four times as many at ever other rows, and the first row above
    `MAX_SKIPPED`: then it is something else that kills workers.

    Kills come from outside, and whoever kills may stop: these end the run when no batch has
    arrived for `patience_seconds`.

    Args:
        max_deaths: How often a worker may die at the same row.
        patience_seconds: How long workers are started that are killed before their first batch.
        clock: Tells the time in seconds.
    """

    max_deaths: int
    patience_seconds: float
    clock: Callable[[], float] = time.monotonic
    in_a_row: int = 0
    """Deaths since the last batch."""
    _at: Counter[Address] = field(default_factory=Counter)
    _first: float = 0.0
    _elsewhere: int = 0
    _since_skip: int = 0
    _skipped: int = 0

    def died(self, address: Address | None, *, killed: bool = False) -> Verdict:
        """Count a death.

        Args:
            address: The sample that was being worked on; None if it was not a single one.
            killed: Whether it was a kill from outside.
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
        """How long it has been since the first death after the last batch."""
        return self.clock() - self._first if self.in_a_row else 0.0

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start: not at first, then longer each time."""
        if self.in_a_row < 2:
            return 0.0
        return float(min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self.in_a_row - 2, 30)))

    def delivered(self) -> None:
        """Note that a batch has arrived."""
        self.in_a_row = self._elsewhere = self._since_skip = self._skipped = 0
