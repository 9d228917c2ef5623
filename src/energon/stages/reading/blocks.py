"""Blocks of rows: what readers return, how lanes share one, and how they take samples from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from energon.arrays import Ints
from energon.plan.rows import Rows
from energon.samples.crude import record_sources

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
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

        The iterator may have a method `columns(count)` that returns the next `count` samples
        already collated, or None if fewer are left; it then also has a length hint. Rows of
        several datasets are collated together if each has the same `column_names`.
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


class SharedBlock:
    """One iterator over the samples of a block, shared by lanes that take from it in turn.

    Args:
        lazy: The samples.
        stop: Number of samples.
    """

    __slots__ = ("lazy", "row", "samples")

    def __init__(self, lazy: LazyRows, stop: int) -> None:
        self.lazy = lazy
        self.samples = lazy.between(0, stop)
        self.row = 0


class BlockPieces(NamedTuple):
    """How a block is divided among the lanes that are read together; two arrays of equal length.

    One after another, each piece is what a lane needs for its next batch.
    """

    place: Ints
    """The position in the list of lanes of the lane that a piece belongs to."""
    number: Ints
    """Number of rows of each piece."""

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int]]) -> BlockPieces:
        """Return the pieces of some pairs, without empty ones."""
        place, number = np.array([*pieces, (0, 0)], np.int64).T
        return cls(place[number > 0], number[number > 0])

    def followed_by(self, places: Sequence[int], turn: int, room: int) -> BlockPieces:
        """Return these pieces, and then a turn of each lane again and again until `room` is full.

        Args:
            places: The lanes that have rows left.
            turn: Rows of a turn.
            room: Rows to be shared; the last turn may be shorter.
        """
        turns = -(-room // turn) if places else 0
        number = np.full(turns, turn)
        number[-1:] -= turns * turn - room
        turns_of = np.resize(np.array(places, np.int64), turns)
        place = np.concatenate([self.place, turns_of])
        return BlockPieces(place, np.concatenate([self.number, number]))

    @property
    def are_even(self) -> bool:
        """Whether all pieces but the first and last have the same size."""
        between = self.number[1:-1]
        return bool((between == between[:1]).all())

    def by_lane(self, lanes: int) -> list[int]:
        """Return the number of rows of each lane."""
        counts: list[int] = np.bincount(self.place, self.number, lanes).astype(np.int64).tolist()
        return counts

    def cut(self, counts: Sequence[int]) -> BlockPieces:
        """Return these pieces, shortened to `counts`: the rows that lanes have left."""
        left, found = list(counts), []
        for place, number in zip(self.place.tolist(), self.number.tolist(), strict=True):
            found.append((place, min(number, left[place])))
            left[place] -= found[-1][1]
        return BlockPieces.of(found)

    def in_order(self, rows: Sequence[Rows]) -> Rows:
        """Return the rows of all lanes in the order of the pieces.

        Samples are then used in their order in memory.
        """
        if len(self.place) == 1:
            return rows[int(self.place[0])]
        by_lane, ends = self._by_lane, np.cumsum(self.number)
        begins = np.empty_like(ends)
        begins[by_lane] = np.cumsum(self.number[by_lane]) - self.number[by_lane]
        order = np.arange(ends[-1]) + np.repeat(begins - (ends - self.number), self.number)
        return Rows(*(np.concatenate(columns)[order] for columns in zip(*rows, strict=True)))

    def bounds(self, lanes: int) -> list[list[tuple[int, int]]]:
        """Return for each lane the indices in the block at which its pieces start and stop."""
        by_lane, stops = self._by_lane, np.cumsum(self.number)
        pairs = zip((stops - self.number)[by_lane].tolist(), stops[by_lane].tolist(), strict=True)
        return [
            list(islice(pairs, number))
            for number in np.bincount(self.place, minlength=lanes).tolist()
        ]

    @property
    def _by_lane(self) -> Ints:
        """The numbers of the pieces, those of the first lane first."""
        return np.argsort(self.place, kind="stable")


@dataclass(slots=True, eq=False)
class ReadSamples:
    """The samples of a block that belong to one lane, built when they are taken.

    Args:
        start: Index in the block of the next one.
        stop: Index after the last one of the same piece.
        pieces: The pieces that follow: the first index of each, and the one after its last.
        block: The iterator that all lanes of the block share; None if the lane has its own.
        own: The lane's own iterator; None until it leaves the shared one.
    """

    start: int
    stop: int
    pieces: Iterator[tuple[int, int]]
    block: SharedBlock | None = None
    own: Iterator[Any] | None = None

    def move_on(self) -> bool:
        """Continue with the next piece; return False if there is none."""
        piece = next(self.pieces, None)
        if piece is None:
            return False
        self.start, self.stop = piece
        self.own = None
        return True


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


class ReadAhead(Protocol):
    """Prepares the samples of lanes that are read together."""

    @property
    def planned_blocks(self) -> int:
        """How many blocks of rows should be planned for `move_to`, with the one that is read."""

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Set what each lane reads next; anything before that is no longer needed."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the statistics since the last call, by name."""
