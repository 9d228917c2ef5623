"""What to do about a worker that has died: try again, leave a row out, or give up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

Address = tuple[int, int]
"""Lane and row."""


MAX_SKIPPED = 16
"""How many rows may be left out before the next batch arrives."""


class Verdict(Enum):
    """What follows from a death."""

    RETRY = "retry"
    SKIP = "skip"
    GIVE_UP = "give up"


@dataclass
class DeathRecord:
    """The deaths of one worker and its successors.

    A row that has seen `max_deaths` of them is left out. Deaths elsewhere (while starting,
    between samples, or in a hook that gets several) end the run after as many in a row. Without
    one batch in between, so do four times as many at ever other rows, and the first row above
    `MAX_SKIPPED`: then it is something else that kills workers.
    """

    max_deaths: int
    _at: Counter[Address] = field(default_factory=Counter)
    _elsewhere: int = 0
    _since_progress: int = 0
    _skipped: int = 0

    def died(self, address: Address | None) -> Verdict:
        """Count a death at `address`, or None if not a single sample was being worked on."""
        self._since_progress += 1
        if address is None:
            self._elsewhere += 1
            given_up = self._elsewhere >= self.max_deaths
            return Verdict.GIVE_UP if given_up else Verdict.RETRY
        self._at[address] += 1
        if self._at[address] >= self.max_deaths:
            self._since_progress = 0
            self._skipped += 1
            return Verdict.SKIP if self._skipped <= MAX_SKIPPED else Verdict.GIVE_UP
        given_up = self._since_progress >= 4 * self.max_deaths
        return Verdict.GIVE_UP if given_up else Verdict.RETRY

    def delivered(self) -> None:
        """Note that a batch has arrived."""
        self._elsewhere = self._since_progress = self._skipped = 0
