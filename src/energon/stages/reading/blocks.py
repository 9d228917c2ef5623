"""How far a lane is read, what it asks of its readers, and what they return: blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np

from energon.arrays import Ints
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


class LazyRows(Protocol):
    """Samples whose bytes are in memory, and which are built only when they are taken.

    Building and releasing samples batch by batch takes two thirds of the time of building
    thousands at once, which would evict one another from the CPU cache.
    """

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`.

        The iterator may have a method `take(count)` that returns the next samples in a list:
        `count`, or as many as are left. It may also have `columns(count)`, which returns the next
        `count` samples already collated, or None if fewer are left, and needs a length hint. Rows
        of several datasets are collated together if each has the same `column_names`.
        """


class LazyLeafRows(LazyRows, Protocol):
    """Samples of one dataset."""

    def with_sources(self, dataset_path: str) -> LazyRows:
        """Return the same samples with their origin in `__sources__`."""


class ReleasedRows:
    """Base of samples that iterators release as they pass them on.

    The next batch then reuses the memory of the last. Nothing else may keep them until then.
    """


@dataclass(frozen=True)
class RowsAtOnce(ReleasedRows):
    """Samples that are already built."""

    samples: list[Any]

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from `start` to `stop`."""
        return released(self.samples[start:stop])

    def with_sources(self, dataset_path: str) -> RowsAtOnce:
        """Store the origin of each sample in it."""
        record_sources(dataset_path, self.samples)
        return self


def released(items: list[T]) -> Iterator[T]:
    """Yield items, each of which is taken out of the list first."""
    items.reverse()
    return map(list.pop, repeat(items, len(items)))


class Reader(Protocol):
    """Yields the samples of rows; shared by all lanes of a worker."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def read(self, rows: Rows) -> list[Any]:
        """Return the samples of `rows`, in that order."""

    def read_lazily(self, rows: Rows) -> LazyRows:
        """Return the samples of `rows`, built only when they are taken where that is possible."""

    def read_ahead(self, lanes_of_stream: int) -> ReadAhead | None:
        """Return what prepares samples in this worker; None if nothing needs to be prepared.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
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
    """

    plan: Plan | None = None
    row: int = 0
    known: int = 0


class ReadAhead(Protocol):
    """Prepares the samples of lanes that are read together."""

    @property
    def planned_blocks(self) -> int:
        """How many blocks of rows should be planned for `move_to`, with the one that is read."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""


# Not frozen: one is made for every few samples, and fields of frozen ones take longer to set.
@dataclass(eq=False)
class LazyKeys(Sequence[tuple[int, int, int]]):
    """The restore keys of samples of a leaf, made when their turn comes.

    The garbage collector would traverse thousands of waiting tuples.
    """

    leaf: int
    epoch: Ints
    ordinal: Ints

    def __len__(self) -> int:
        return len(self.ordinal)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(repeat(self.leaf), self.epoch.tolist(), self.ordinal.tolist(), strict=False)

    @overload
    def __getitem__(self, places: int) -> tuple[int, int, int]: ...

    @overload
    def __getitem__(self, places: slice | Ints) -> LazyKeys: ...

    def __getitem__(self, places: int | slice | Ints) -> tuple[int, int, int] | LazyKeys:
        if isinstance(places, int):
            return self.leaf, int(self.epoch[places]), int(self.ordinal[places])
        return LazyKeys(self.leaf, self.epoch[places], self.ordinal[places])
