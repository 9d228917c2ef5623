"""What the stages of one lane share while it is open in some worker."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from energon.errors import ConfigError
from energon.plan.rows import Plan


@dataclass(eq=False)
class Reading:
    """What is read in a lane; all stages see the same, whatever else of the lane they replace.

    Args:
        plan: The order, if it is not that of the stage which reads.
        row: The row behind the last one that was ever handed on.
    """

    plan: Plan | None = None
    row: int = 0


@dataclass(eq=False)
class Lane:
    """One lane, open in a worker.

    Args:
        number: Which lane, from 0.
        lanes: How many lanes the run has.
        seed: Seed of the run.
        skip_rows: Rows that are left out because reading them killed a worker.
        progress: Called with the row of every sample before user code works on it, or that of
            the first of several, and whether these are several; tells the loader that the
            worker lives, and where it was if it dies. None means nobody asks.
        counts: Statistics of the lane: samples, skipped, failed, by name.
        row: Row of the sample that user code works on, or with which its batch begins.
        batch: How many batches the lane has yielded.
        reading: By which plan and how far the lane is read.
    """

    number: int
    lanes: int
    seed: int = 0
    skip_rows: frozenset[int] = frozenset()
    progress: Callable[[int, bool], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    row: int = 0
    batch: int = 0
    reading: Reading = field(default_factory=Reading)

    def enter(self, row: int, *, several: bool = False) -> None:
        """Note that user code gets the sample of this row, or several that begin with it."""
        self.row = row
        if self.progress is not None:
            self.progress(row, several)

    @property
    def sample_index(self) -> int:
        """Number of the present sample among those of all lanes."""
        return self.row * self.lanes + self.number

    @property
    def batch_index(self) -> int:
        """Number of the present batch among those of all lanes."""
        return self.batch * self.lanes + self.number


class _Active(threading.local):
    """The lane for which this thread runs user code."""

    lane: Lane | None = None


active = _Active()


def active_lane() -> Lane:
    """Return the lane for which this thread runs user code.

    Raises:
        ConfigError: If it runs none.
    """
    if active.lane is None:
        raise ConfigError("there is no present sample or batch: ask for it in a hook")
    return active.lane
