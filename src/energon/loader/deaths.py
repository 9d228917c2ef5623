"""What to do about a worker that has died: try again, leave a row out, or give up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

Address = tuple[int, int]
"""Lane and row."""


class Verdict(Enum):
    """What follows from a death."""

    RETRY = "retry"
    SKIP = "skip"
    GIVE_UP = "give up"


@dataclass
class DeathRecord:
    """The deaths of one worker and its successors.

    A row that has seen `max_deaths` of them is left out. Deaths elsewhere (while starting, or
    between samples) end the run after as many in a row; deaths at ever other rows, without one
    batch in between, after four times as many.
    """

    max_deaths: int
    _at: Counter[Address] = field(default_factory=Counter)
    _elsewhere: int = 0
    _since_progress: int = 0

    def died(self, address: Address | None) -> Verdict:
        """Count a death at `address`, or None if no sample was being worked on."""
        self._since_progress += 1
        if address is None:
            self._elsewhere += 1
            given_up = self._elsewhere >= self.max_deaths
            return Verdict.GIVE_UP if given_up else Verdict.RETRY
        self._at[address] += 1
        if self._at[address] >= self.max_deaths:
            self._since_progress = 0
            return Verdict.SKIP
        given_up = self._since_progress >= 4 * self.max_deaths
        return Verdict.GIVE_UP if given_up else Verdict.RETRY

    def delivered(self) -> None:
        """Note that a batch has arrived."""
        self._elsewhere = self._since_progress = 0
