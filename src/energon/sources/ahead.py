"""Fetch what a lane will read, before it does.

The order is known, so requests are planned as reads of local files are: rows of the plan become
byte ranges, neighbours among them become spans, and spans are fetched in the order in which
they are needed first, as many as fit into the memory of the lane. A span that is begun is
complete: planning looks beyond its rows by a window, within which every sample of a slice comes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from energon.io.range_file import RemoteFile
from energon.io.ranges import Span, SpanBuffer, merge_ranges, span_buffer
from energon.io.registry import take_counts
from energon.io.settings import StorageSettings
from energon.plan.leaf import PlanLeaf
from energon.plan.rows import Rows
from energon.sources.kinds import Source

FIRST_STEP_ROWS = 64
MAX_STEP_ROWS = 2048
"""Rows planned at a time, beyond the window: few at first, so that the first batch comes soon."""
MAX_ROWS_AHEAD = 32_768
MAX_WINDOW_ROWS = 16_384

PlanRows = Callable[[int, int], Rows]
"""`rows(start, count)` of a lane."""

Ints = NDArray[np.int64]

_open_lanes: weakref.WeakSet[LookAhead] = weakref.WeakSet()


class LookAhead:
    """What is on its way for a lane. Used by one thread.

    Args:
        sources: One for each leaf; those on this machine are left out.
        rows: The plan of the lane.
        window_rows: Within so many rows, all samples of a slice come.
        settings: Says how much memory all lanes of this process have together.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        rows: PlanRows,
        *,
        window_rows: int,
        settings: StorageSettings,
    ) -> None:
        self._sources = sources
        self._rows = rows
        self._window = window_rows
        self._budget = settings.read_ahead_bytes
        self._buffer = span_buffer()
        self._held: deque[Span] = deque()
        self._queue: deque[Span] = deque()
        self._held_bytes = 0
        self._expected, self._settled, self._planned = -1, 0, 0
        self._pending = _Pending.none()
        self._ended = False
        self._step = FIRST_STEP_ROWS
        _open_lanes.add(self)
        weakref.finalize(self, _drop, self._buffer, self._held).atexit = False

    def move_to(self, row: int, count: int) -> None:
        """Note that rows `row` to `row + count` are read next, and fetch what is needed soon."""
        if row != self._expected:
            # The first samples come one by one: their slices would take longer.
            self._begin(row)
            self._plan(count, window=0)
        else:
            self._release(row)
            self._plan_ahead(row, count)
        self._fetch()
        self._expected = row + count

    def take_counts(self) -> Mapping[str, int]:
        """Return what stores were asked for since this was last called, in this process."""
        return take_counts()

    def _plan_ahead(self, row: int, count: int) -> None:
        """Make spans until memory is full, and in any case those of the next rows."""
        while not self._ended and (
            self._settled < row + count or (self._fetch() and self._settled < row + MAX_ROWS_AHEAD)
        ):
            self._plan(max(self._step, row + count - self._settled), window=self._window)
            self._step = min(2 * self._step, MAX_STEP_ROWS)

    def _begin(self, row: int) -> None:
        """Forget all plans and begin at a row."""
        _drop(self._buffer, self._held)
        self._queue.clear()
        self._held_bytes = 0
        self._settled = self._planned = row
        self._pending = _Pending.none()
        self._ended = False
        self._step = FIRST_STEP_ROWS

    def _plan(self, step: int, *, window: int) -> None:
        """Make the spans whose first row is one of the next `step`."""
        target = self._settled + step
        wanted = target + window - self._planned
        if wanted > 0:
            rows = self._rows(self._planned, wanted)
            self._ended = len(rows.leaf) < wanted
            self._pending = self._pending.extended(rows, self._planned)
            self._planned += len(rows.leaf)
        if self._ended:
            target = self._planned
        spans = sorted(self._settle(target), key=lambda span: span.first_row)
        self._queue.extend(spans)
        self._settled = target

    def _settle(self, target: int) -> Iterator[Span]:
        """Yield the spans that are needed before row `target`, and forget the rows in them."""
        done = self._pending.row < target
        for leaf in np.unique(self._pending.leaf).tolist():
            source = self._sources[leaf]
            if not source.is_remote:
                continue
            mine = np.flatnonzero(self._pending.leaf == leaf)
            for file, places, low, high in source.extents(self._pending.ordinal[mine]):
                if not isinstance(file, RemoteFile):
                    continue
                places = mine[places]
                merged = merge_ranges(low, high)
                rows = self._pending.row[places]
                first = np.full(len(merged.start), np.iinfo(np.int64).max)
                last = np.zeros(len(merged.start), np.int64)
                np.minimum.at(first, merged.owner, rows)
                np.maximum.at(last, merged.owner, rows)
                begun = first < target
                done[places] |= begun[merged.owner]
                chosen = np.flatnonzero(begun)
                edges = (merged.start, merged.stop, first, last)
                for numbers in zip(*(edge[chosen].tolist() for edge in edges), strict=True):
                    yield from Span(file.object, *numbers).pieces()
        self._pending = self._pending.picked(~done)

    def _fetch(self) -> bool:
        """Begin to fetch what there is memory for; return whether there is some left."""
        share = self._budget // max(1, len(_open_lanes))
        while self._queue:
            span = self._queue[0]
            if self._held and self._held_bytes + span.size > share:
                return False
            self._buffer.fetch(self._queue.popleft())
            self._held.append(span)
            self._held_bytes += span.size
        return self._held_bytes < share

    def _release(self, row: int) -> None:
        """Drop what is not needed from a row on."""
        spent = [span for span in self._held if span.last_row < row]
        if spent:
            self._buffer.drop(spent)
            self._held_bytes -= sum(span.size for span in spent)
            left = [span for span in self._held if span.last_row >= row]
            self._held.clear()
            self._held.extend(left)
        while self._queue and self._queue[0].last_row < row:
            self._queue.popleft()


def window_rows(leaves: Sequence[PlanLeaf], *, shuffle_window: int = 0) -> int:
    """Return within how many rows of a lane all samples of a slice come, for any leaf.

    Beyond `MAX_WINDOW_ROWS` planning would cost more than it saves: slices of leaves with a tiny
    share of the blend are then fetched sample by sample.
    """
    total = sum(leaf.weight for leaf in leaves)
    rows = [
        leaf.slice_samples * leaf.parallel_slices * total / leaf.weight
        for leaf in leaves
        if leaf.weight
    ]
    return int(min(MAX_WINDOW_ROWS, max(rows, default=0) + shuffle_window))


class _Pending:
    """Rows whose spans are not made yet."""

    def __init__(self, row: Ints, leaf: NDArray[np.int32], ordinal: Ints) -> None:
        self.row = row
        self.leaf = leaf
        self.ordinal = ordinal

    @classmethod
    def none(cls) -> _Pending:
        return cls(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))

    def extended(self, rows: Rows, start: int) -> _Pending:
        return _Pending(
            np.concatenate((self.row, np.arange(start, start + len(rows.leaf)))),
            np.concatenate((self.leaf, rows.leaf)),
            np.concatenate((self.ordinal, rows.ordinal)),
        )

    def picked(self, chosen: NDArray[np.bool_]) -> _Pending:
        return _Pending(self.row[chosen], self.leaf[chosen], self.ordinal[chosen])


def _drop(buffer: SpanBuffer, held: deque[Span]) -> None:
    buffer.drop(held)
    held.clear()
