"""What the stages of one lane share while it is open in some worker."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from energon.errors import ConfigError
from energon.plan.rows import Plan
from energon.plan.seeds import derive_seed


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
class Present:
    """What a lane works on now; all stages see the same.

    Args:
        row: Row of the sample that user code gets, or with which its batch begins.
        batch: How many batches the lane has yielded before.
    """

    row: int = 0
    batch: int = 0


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
        present: What it works on.
        pass_number: How often finite data have been read before, for stages that repeat them.
        stride: What to multiply a row with, and
        offset: what to add to it, to get the number by which it is known outside.
        reading: By which plan and how far the lane is read.
    """

    number: int
    lanes: int
    seed: int = 0
    skip_rows: frozenset[int] = frozenset()
    progress: Callable[[int, bool], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    present: Present = field(default_factory=Present)
    pass_number: int = 0
    stride: int = 1
    offset: int = 0
    reading: Reading = field(default_factory=Reading)

    def enter(self, row: int, *, several: bool = False) -> None:
        """Note that user code gets the sample of this row, or several that begin with it."""
        known = row * self.stride + self.offset
        self.present.row = known
        if self.progress is not None:
            self.progress(known, several)

    def branch(self, number: int, count: int) -> Lane:
        """Return the lane for one of `count` streams that are merged.

        Each reads by a plan of its own, and its rows are told from those of the others: row r
        of stream i is known as r·count + i outside.
        """
        return replace(
            self,
            skip_rows=frozenset(row // count for row in self.skip_rows if row % count == number),
            stride=self.stride * count,
            offset=self.offset + self.stride * number,
            reading=Reading(),
        )

    @property
    def sample_index(self) -> int:
        """Number of the present sample among those of all lanes."""
        return self.present.row * self.lanes + self.number

    @property
    def batch_index(self) -> int:
        """Number of the present batch among those of all lanes."""
        return self.present.batch * self.lanes + self.number


class _Active(threading.local):
    """For what this thread runs user code: the lane, and the hook and what its argument is."""

    lane: Lane | None = None
    call: tuple[str, tuple[int | str, ...]] = ("", ())
    generator: tuple[object, np.random.Generator] | None = None


active = _Active()


def active_lane() -> Lane:
    """Return the lane for which this thread runs user code.

    Raises:
        ConfigError: If it runs none.
    """
    if active.lane is None:
        raise ConfigError("there is no present sample or batch: ask for it in a hook")
    return active.lane


def active_generator() -> np.random.Generator:
    """Return the generator of the running call of a hook, seeded by what its argument is.

    Raises:
        ConfigError: If no hook is running.
    """
    lane, call = active_lane(), active.call
    if active.generator is None or active.generator[0] is not call:
        name, address = call
        seed = derive_seed(lane.seed, "generator", name, *address)
        active.generator = call, np.random.default_rng(seed)
    return active.generator[1]
