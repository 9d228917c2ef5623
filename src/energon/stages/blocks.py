"""How far a lane is read, what it asks of its readers, and what they return: blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from energon.plan.rows import Plan, Rows
from energon.samples.provenance import record_sources

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MIN_PLANNED_ROWS = 64
"""Planning a few takes as long as this, also where a block is a single sample of megabytes."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, small enough for hundreds of lanes."""
T = TypeVar("T")
PlanRows = Callable[[int, int], Rows]
"""Return the rows of a lane: `rows(start, count)`."""


class Block:
    """Samples that were read together: their bytes are in memory, and each is built when taken.

    Building and releasing samples batch by batch takes two thirds of the time of building
    thousands at once, which would evict one another from the CPU cache. A sample is taken once, so
    that the block can release its bytes.

    Attributes:
        column_names: The parts that `columns` returns; empty if samples are collated one by one.
            Samples of several datasets with the same names are collated together.
    """

    column_names: tuple[str, ...] = ()

    def samples(self, start: int, stop: int) -> list[Any]:
        """Return the samples from `start` to `stop`."""
        raise NotImplementedError

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        """Return the samples from `start` to `stop` as columns, equal to collating them."""
        raise NotImplementedError

    def with_sources(self, dataset_path: str) -> Block:
        """Return the same samples, all of one dataset, with their origin in `__sources__`."""
        raise NotImplementedError


class BuiltBlock(Block):
    """A block of samples that are already built."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def samples(self, start: int, stop: int) -> list[Any]:
        return release(self._samples, start, stop)

    def with_sources(self, dataset_path: str) -> BuiltBlock:
        record_sources(dataset_path, self._samples)
        return self


def release(items: list[T | None], start: int, stop: int) -> list[T]:
    """Return the items from `start` to `stop`, and keep none of them in the list."""
    taken = items[start:stop]
    items[start:stop] = [None] * len(taken)
    return taken  # type: ignore[return-value]


class Reader(Protocol):
    """Reads the samples of rows; shared by all lanes of a worker."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def read(self, rows: Rows) -> Block:
        """Return the samples of `rows`, in that order."""

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> ReadAhead | None:
        """Return the preparation of samples in this worker; None if they need none.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
            mixed_rows: Rows of a lane that are balanced together, with those of other lanes.
        """


NO_ROWS = Rows(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


class NextRows(NamedTuple):
    """The rows that a lane reads next."""

    lane: int
    rows: PlanRows
    start: int
    number: int
    """Number of rows."""
    planned: Rows = NO_ROWS
    """Those that are already planned: the first of them, and perhaps more."""


@dataclass(eq=False)
class LaneReading:
    """How far a lane has been read, shared by all stages even if they replace other parts of it.

    Args:
        plan: The order of the lane; None for that of the reading stage.
        row: The row after the last one that was passed on.
        known: Its value when the lane was opened.
        unit_rows: How many consecutive rows later stages need together.
    """

    plan: Plan | None = None
    row: int = 0
    known: int = 0
    unit_rows: int = 1


class ReadAhead(Protocol):
    """Prepares the samples of lanes that are read together."""

    @property
    def planned_blocks(self) -> int:
        """How many blocks of rows should be planned for `move_to`, with the one that is read."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""
