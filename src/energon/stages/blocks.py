"""How readers and lanes exchange blocks of rows, and how lanes take their samples from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon.plan.rows import Rows
from energon.stages.lazy_rows import LazyRows

MAX_PLANNED_ROWS = 4096
"""Rows planned at once; the cost per row of numpy calls is flat from about here on."""
MAX_BLOCK_BYTES = 8 << 20
"""Bytes read at once for a lane: enough for full spans, small enough for hundreds of lanes."""
PlanRows = Callable[[int, int], Rows]
"""Return the rows of a lane: `rows(start, count)`."""


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
