"""Read the rows of a plan from the sources of all its leaves, and fetch them ahead of time.

The order is known, so requests to stores are planned like reads of local files: rows of the plan
become byte ranges, neighboring ranges become spans, and spans are fetched in the order of their
first use, as many as fit into memory. A span is complete when its fetch starts: planning looks
ahead by a window within which every sample of a slice occurs. Lanes that are read together are
planned together, since they read the same slices.

Planning progress is counted for each lane from its present position, not from its start: hooks
that skip samples let some lanes advance further than others. For the same reason a span is dropped
when all of its rows have been read, in whatever order.

A row group of a local Parquet file is decoded as a whole, which takes milliseconds in which the
trainer would wait. So a thread decodes the next ones while the hooks run.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.errors import EnergonError
from energon.io.files import take_counts
from energon.io.range_file import RemoteFile, Span, SpanBuffer, merge_ranges, span_buffer
from energon.io.settings import StorageSettings
from energon.io.threads import WaitingThreads
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.randomness import shared
from energon.plan.rows import Rows
from energon.samples.provenance import SourceInfo
from energon.sources.source import DecodesAhead, Source
from energon.stages.lane import Block, NextRows, ReadAhead

MIN_DECODED_BYTES = 1 << 10
"""Minimum average size of samples to decode them ahead; smaller ones are decoded in no time."""


@dataclass(frozen=True)
class LocatedSource(SourceInfo):
    """Where a sample came from, with everything needed to look at it."""

    key: str = ""
    offset: int = 0

    def __str__(self) -> str:
        return (
            f"sample {self.key!r} of {self.dataset_path} (number {self.index}; {self.shard_name} "
            f"at byte {self.offset})"
        )

    @property
    def quarantine_entry(self) -> str:
        """The line of a quarantine file that excludes it."""
        from energon.stages.hooks.failures import quarantine_line

        return quarantine_line(self.dataset_path, self.shard_name, self.key)


@dataclass(frozen=True)
class LostSource(SourceInfo):
    """Where a sample came from, as far as that is known without its shard."""

    reason: str = ""

    def __str__(self) -> str:
        return f"sample number {self.index} of {self.dataset_path}, not located: {self.reason}"


@dataclass(frozen=True)
class LeafReader:
    """Reads the samples of rows, as dicts of bytes.

    Args:
        sources: One for each leaf of the plan.
        subflavors: The `__subflavors__` of each leaf's samples.
        window_rows: Within how many rows of a stream all samples of a slice occur, for read-ahead
            from remote stores.
        source_paths: For each leaf, the dataset that `__sources__` names; None to record none.
            Empty to record none for any leaf.
    """

    sources: tuple[Source, ...]
    subflavors: tuple[Mapping[str, Any], ...]
    window_rows: int = 0
    source_paths: tuple[str | None, ...] = ()

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample over the leaves, in bytes."""
        return sum(source.mean_sample_bytes for source in self.sources) / len(self.sources)

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> ReadAhead | None:
        """Return the read-ahead of remote samples, or the decoding ahead of local ones.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
            mixed_rows: Rows of a lane that are balanced together, with those of other lanes.
        """
        if any(source.is_remote for source in self.sources):
            return PlannedReadAhead(
                self.sources,
                window_rows=-(-self.window_rows // lanes_of_stream) + mixed_rows,
                settings=StorageSettings.from_environment(),
            )
        decoded = {
            leaf: source
            for leaf, source in enumerate(self.sources)
            if isinstance(source, DecodesAhead) and source.mean_sample_bytes >= MIN_DECODED_BYTES
        }
        if not decoded:
            return None
        return DecodeAhead(decoded)

    def read(self, rows: Rows) -> Block:
        """Return the samples of `rows`, in that order.

        Their `__restore_key__` is (leaf, epoch, ordinal).
        """
        leaves = sorted(set(shared(rows.leaf).tolist()))
        if len(leaves) == 1:  # nearly always
            return self._read_leaf(leaves[0], rows)
        blocks = {leaf: self._read_leaf(leaf, rows.pick(rows.leaf == leaf)) for leaf in leaves}
        return _MixedBlock(rows.leaf.tolist(), blocks)

    def locate(self, restore_key: tuple[int, ...]) -> tuple[SourceInfo, ...]:
        """Return the origin of the sample with this `__restore_key__`; for a join, all of them.

        If a shard cannot be read, the origin says so: messages about failures contain these.

        Raises:
            IndexError: If there is no such sample.
        """
        leaf, _, ordinal = restore_key[:3]
        if not 0 <= leaf < len(self.sources):
            raise IndexError(f"there are leaves 0 to {len(self.sources) - 1}, not {leaf}")
        return tuple(_locate(*origin) for origin in self.sources[leaf].origins(ordinal))

    def _read_leaf(self, leaf: int, rows: Rows) -> Block:
        source = self.sources[leaf]
        keys = list(zip(repeat(leaf), rows.epoch.tolist(), rows.ordinal.tolist(), strict=False))
        block = source.read(rows.ordinal, restore_keys=keys, subflavors=self.subflavors[leaf])
        dataset_path = self.source_paths[leaf] if self.source_paths else None
        return block if dataset_path is None else block.with_sources(dataset_path)


class _MixedBlock(Block):
    """The samples of several leaves.

    Args:
        leaves: The leaf of each sample.
        blocks: The samples of each leaf.
    """

    def __init__(self, leaves: list[int], blocks: Mapping[int, Block]) -> None:
        self._leaves, self._blocks = leaves, blocks
        counters = defaultdict[int, Iterator[int]](count)
        # The number of each sample among those of its leaf.
        self._numbers = [next(counters[leaf]) for leaf in leaves]
        names = {block.column_names for block in blocks.values()}
        self.column_names = names.pop() if len(names) == 1 else ()

    def samples(self, start: int, stop: int) -> list[Any]:
        leaves = self._leaves[start:stop]
        own = {
            leaf: iter(self._blocks[leaf].samples(first, last))
            for leaf, (first, last) in self._bounds(start, stop).items()
        }
        return list(map(next, map(own.__getitem__, leaves)))

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        leaves, bounds = self._leaves[start:stop], self._bounds(start, stop)
        own = {leaf: self._blocks[leaf].columns(*bounds[leaf]) for leaf in bounds}
        if len(own) == 1:
            return own[leaves[0]]
        indices = {
            leaf: [index for index, each in enumerate(leaves) if each == leaf] for leaf in own
        }
        return {
            name: _merged([(indices[leaf], own[leaf][name]) for leaf in own], len(leaves))
            for name in own[leaves[0]]
        }

    def _bounds(self, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """Return for each leaf which of its samples are among those from `start` to `stop`."""
        leaves = self._leaves[start:stop]
        firsts = {leaf: self._numbers[start + leaves.index(leaf)] for leaf in dict.fromkeys(leaves)}
        return {leaf: (first, first + leaves.count(leaf)) for leaf, first in firsts.items()}


def _merged(columns: Sequence[tuple[Sequence[int], Any]], count: int) -> Any:
    """Return columns of some samples as one; arrays are padded with zeros, as in collating.

    Args:
        columns: Each with the indices of its samples.
        count: How many samples there are.
    """
    arrays = [values for _, values in columns if isinstance(values, np.ndarray)]
    if not arrays:
        if columns[0][1] is None:
            return None
        merged: Any = [None] * count
        for requested, values in columns:
            for index, value in zip(requested, values, strict=True):
                merged[index] = value
        return merged
    shape = (count, *map(max, *(array.shape[1:] for array in arrays)))
    is_even = all(array.shape[1:] == shape[1:] for array in arrays)
    merged = (np.empty if is_even else np.zeros)(shape, np.result_type(*arrays))
    for requested, values in columns:
        merged[(requested, *map(slice, values.shape[1:]))] = values
    return merged


def _locate(source: Source, ordinal: int) -> SourceInfo:
    try:
        location = source.locate(ordinal)
    except (EnergonError, OSError) as error:
        return LostSource(str(source.path), ordinal, None, (), reason=str(error))
    return LocatedSource(
        dataset_path=str(source.path),
        index=ordinal,
        shard_name=location.shard,
        file_names=tuple(f"{location.key}.{part}" for part in location.parts),
        key=location.key,
        offset=location.offset,
    )


FIRST_STEP_ROWS = 64
MAX_STEP_ROWS = 2048
"""Rows planned at a time beyond the window: few at first, so that the first batch is early."""
MAX_ROWS_AHEAD = 32_768
FETCHED_BATCHES = 64
"""Maximum number of batches fetched ahead; the next two blocks are fetched in any case."""
KEPT_SHARE = 0.5
"""Datasets that fit into this share of the memory are fetched once and kept for all epochs."""
MAX_WINDOW_ROWS = 16_384
MAX_SPANS_AHEAD = 1024
"""Maximum number of spans in memory or being fetched: enough for any latency with small files."""

DECODED_AHEAD_BYTES = 128 << 20
"""Memory of a worker for blocks that are decoded ahead, of all its sources together."""

Bools = NDArray[np.bool_]

_open_lanes: weakref.WeakSet[PlannedReadAhead] = weakref.WeakSet()


class PlannedReadAhead:
    """The read-ahead of lanes that are read together. Used by one thread.

    Args:
        sources: One for each leaf; local ones are ignored.
        window_rows: All samples of a slice occur within this many rows of each lane.
        settings: The limits, such as the memory for all lanes of this process.
    """

    planned_blocks = 1

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        window_rows: int,
        settings: StorageSettings,
    ) -> None:
        self._sources = sources
        self._window = window_rows
        self._budget = settings.read_ahead_bytes
        self._kept = _kept_leaves(sources, settings)
        self._batch_rows = 1
        self._buffer = span_buffer()
        self._held: dict[int, list[Span]] = {}
        self._queue: deque[int] = deque()
        self._spans: dict[int, _Needed] = {}
        self._next_span = 0
        self._held_bytes = 0
        self._lanes: dict[int, _Lane] = {}
        self._pending = _Pending.none()
        self._step = FIRST_STEP_ROWS
        if not len(_open_lanes):
            take_counts()  # of closed loaders, whose last requests were not counted
        _open_lanes.add(self)
        weakref.finalize(self, _end, self._buffer, self._held).atexit = False

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Record what each lane reads next, and fetch what is needed soon."""
        lanes = self._lanes
        if any(each.lane in lanes and lanes[each.lane].stop != each.start for each in readings):
            self._forget()
        is_first = not self._lanes
        rows = sum(each.number for each in readings)
        if is_first:
            self._batch_rows = max(1, rows)  # the first block is a batch
        self._most_rows = min(MAX_ROWS_AHEAD, max(FETCHED_BATCHES * self._batch_rows, 2 * rows))
        for each in readings:
            lane = self._lanes.get(each.lane)
            if lane is None:
                lane = self._lanes[each.lane] = _Lane(len(self._lanes), each)
            self._release(lane.move_to(each))
        if is_first:
            # The first samples are read one by one: their slices would take longer.
            self._plan({lane.slot: lane.stop for lane in self._lanes.values()}, window=0)
        else:
            self._plan_ahead()
        self._fetch()

    def take_counts(self) -> Mapping[str, int]:
        """Return the requests made to stores since this was last called, in this process."""
        return take_counts()

    def _plan_ahead(self) -> None:
        """Make spans until memory is full, and in any case those of the next rows."""
        while lanes := [lane for lane in self._lanes.values() if not lane.ended]:
            depth = min(lane.settled - lane.start for lane in lanes)
            is_short = any(lane.settled < lane.stop for lane in lanes)
            if not is_short and not (self._fetch() and depth * len(lanes) < self._most_rows):
                break
            depth += max(1, self._step // len(lanes))
            targets = {
                lane.slot: max(lane.settled, lane.stop, lane.start + depth) for lane in lanes
            }
            self._plan(targets, window=self._window)
            self._step = min(2 * self._step, MAX_STEP_ROWS)

    def _plan(self, targets: dict[int, int], *, window: int) -> None:
        """Make the spans that begin before some row of each lane, by slot.

        Args:
            targets: The rows.
            window: How far to look beyond them for samples that belong to the same spans.
        """
        lanes = [lane for lane in self._lanes.values() if lane.slot in targets]
        planned = [lane.plan(targets[lane.slot] + window) for lane in lanes]
        self._pending = self._pending.extended([each for each in planned if each is not None])
        edges = np.zeros(len(self._lanes), np.int64)
        starts = np.zeros(len(self._lanes), np.int64)
        for lane in self._lanes.values():
            if lane.slot in targets:
                lane.settled = lane.planned if lane.ended else targets[lane.slot]
            edges[lane.slot], starts[lane.slot] = lane.settled, lane.start
        self._settle(edges, starts)

    def _settle(self, edges: Ints, starts: Ints) -> None:
        """Make spans of what is pending and needed before `edges`, rows of the lanes by slot."""
        pending = self._pending
        due = pending.row < edges[pending.slot]
        done = due.copy()
        urgency = pending.row - starts[pending.slot]
        number = np.full(len(due), -1, np.int64)
        made: list[tuple[int, int]] = []
        for leaf in sorted(set(pending.leaf.tolist())):
            source = self._sources[leaf]
            if leaf < 0 or not source.is_remote:
                continue
            mine = np.flatnonzero(pending.leaf == leaf)
            for file, requested, low, high in source.extents(pending.ordinal[mine]):
                if not isinstance(file, RemoteFile):
                    continue
                chosen = due[mine[requested]]
                if leaf not in self._kept or not self._keep(file, low[chosen], high[chosen]):
                    made += self._make_spans(
                        file,
                        low,
                        high,
                        due[mine[requested]],
                        urgency[mine[requested]],
                        mine[requested],
                        number,
                    )
        done |= number >= 0
        for lane in self._lanes.values():
            chosen = np.flatnonzero((pending.slot == lane.slot) & (number >= 0))
            lane.assign(pending.row[chosen], number[chosen])
        self._queue.extend(span for _, span in sorted(made))
        self._pending = pending.picked(~done)

    def _keep(self, file: RemoteFile, low: Ints, high: Ints) -> bool:
        """Fetch ranges of a file permanently; return whether there is memory for them."""
        most = int(KEPT_SHARE * self._budget)
        return all(
            self._buffer.keep(file.object, start, stop, most=most)
            for start, stop in zip(low.tolist(), high.tolist(), strict=True)
        )

    def _make_spans(
        self,
        file: RemoteFile,
        low: Ints,
        high: Ints,
        due: Bools,
        urgency: Ints,
        requested: Ints,
        number: Ints,
    ) -> Iterator[tuple[int, int]]:
        """Make the spans of a file that are due; yield when each is needed first, and its number.

        Args:
            file: The file.
            low: Where samples begin.
            high: Where they end.
            due: Which of them are due.
            urgency: How soon each is needed.
            requested: Their indices in `number`.
            number: Receives the number of the span that each is in.
        """
        if not due.any():
            return
        merged = merge_ranges(low, high)
        begun = np.zeros(len(merged.start), np.bool_)
        begun[merged.owner[due]] = True
        first = np.full(len(merged.start), np.iinfo(np.int64).max)
        np.minimum.at(first, merged.owner, urgency)
        rows = np.bincount(merged.owner, minlength=len(merged.start))
        numbers = np.full(len(merged.start), -1, np.int64)
        for at in np.flatnonzero(begun).tolist():
            start, stop = int(merged.start[at]), int(merged.stop[at])
            pieces = Span(file.object, start, stop).pieces()
            self._spans[self._next_span] = _Needed(pieces, int(rows[at]))
            numbers[at] = self._next_span
            yield int(first[at]), self._next_span
            self._next_span += 1
        number[requested] = numbers[merged.owner]

    def _fetch(self) -> bool:
        """Begin to fetch whatever fits into memory; return whether some is left."""
        share = (self._budget - self._buffer.kept_bytes) // max(1, len(_open_lanes))
        while self._queue:
            number = self._queue[0]
            needed = self._spans.get(number)
            if needed is not None:
                size = sum(piece.size for piece in needed.pieces)
                if self._held and (
                    self._held_bytes + size > share or len(self._held) >= MAX_SPANS_AHEAD
                ):
                    return False
                for piece in needed.pieces:
                    self._buffer.fetch(piece)
                self._held[number] = needed.pieces
                self._held_bytes += size
            self._queue.popleft()
        return self._held_bytes < share and len(self._held) < MAX_SPANS_AHEAD

    def _release(self, numbers: Ints) -> None:
        """Record that a row of each of these spans was read; drop spans that are used up."""
        for number in distinct(numbers).tolist():
            needed = self._spans.get(number)
            if needed is None:
                continue
            needed.rows -= int((numbers == number).sum())
            if needed.rows <= 0:
                del self._spans[number]
                held = self._held.pop(number, [])
                self._buffer.drop(held)
                self._held_bytes -= sum(piece.size for piece in held)

    def _forget(self) -> None:
        """Discard all plans, to start from another position."""
        self._buffer.drop(chain.from_iterable(self._held.values()))
        self._held.clear()
        self._spans.clear()
        self._queue.clear()
        self._lanes.clear()
        self._held_bytes = 0
        self._pending = _Pending.none()
        self._step = FIRST_STEP_ROWS


class _Needed:
    """A span in pieces of at most one request each, and its number of unread rows."""

    def __init__(self, pieces: list[Span], rows: int) -> None:
        self.pieces = pieces
        self.rows = rows


class _Lane:
    """The progress of reading and planning a lane.

    Of its rows

    - those from `start` to `stop` are read now,
    - those before `settled` have their spans,
    - those before `planned` are known.

    Args:
        slot: Its number among the lanes that are read together.
        reading: The first stage that reads for the lane.
    """

    def __init__(self, slot: int, reading: NextRows) -> None:
        self.slot = slot
        self.start = self.stop = self.settled = self.planned = reading.start
        self.ended = False
        self._reading = reading
        # The number of the span of each row from `start` to `planned`; -1 for none.
        self._spans = np.empty(0, np.int64)

    def move_to(self, reading: NextRows) -> Ints:
        """Advance; return the numbers of the spans of the rows that were read."""
        passed = reading.start - self.start
        used, self._spans = self._spans[:passed], self._spans[passed:]
        self._reading = reading
        self.start, self.stop = reading.start, reading.start + reading.number
        return used[used >= 0]

    def plan(self, target: int) -> tuple[int, int, Rows] | None:
        """Plan up to a row; return the slot, the first new row and what comes there."""
        missing = target - self.planned
        if missing <= 0 or self.ended:
            return None
        start = self.planned
        rows = self._reading.rows(start, missing)
        self.ended = len(rows.leaf) < missing
        self.planned += len(rows.leaf)
        self._spans = np.concatenate((self._spans, np.full(len(rows.leaf), -1, np.int64)))
        return self.slot, start, rows

    def assign(self, rows: Ints, spans: Ints) -> None:
        """Record in which spans some rows are."""
        self._spans[rows - self.start] = spans


def window_rows(leaves: Sequence[PlanLeaf], *, shuffle_window: int = 0) -> int:
    """Return within how many rows of a lane all samples of a slice occur, for any leaf.

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

    def __init__(self, slot: Ints, row: Ints, leaf: NDArray[np.int32], ordinal: Ints) -> None:
        self.slot = slot
        self.row = row
        self.leaf = leaf
        self.ordinal = ordinal

    @classmethod
    def none(cls) -> _Pending:
        none = np.empty(0, np.int64)
        return cls(none, none, np.empty(0, np.int32), none)

    def extended(self, planned: Sequence[tuple[int, int, Rows]]) -> _Pending:
        if not planned:
            return self
        slots = [np.full(len(rows.leaf), slot, np.int64) for slot, _, rows in planned]
        numbers = [np.arange(start, start + len(rows.leaf)) for _, start, rows in planned]
        return _Pending(
            np.concatenate((self.slot, *slots)),
            np.concatenate((self.row, *numbers)),
            np.concatenate((self.leaf, *(rows.leaf for *_, rows in planned))),
            np.concatenate((self.ordinal, *(rows.ordinal for *_, rows in planned))),
        )

    def picked(self, chosen: Bools) -> _Pending:
        return _Pending(
            self.slot[chosen], self.row[chosen], self.leaf[chosen], self.ordinal[chosen]
        )


def _end(buffer: SpanBuffer, held: dict[int, list[Span]]) -> None:
    buffer.leave(list(chain.from_iterable(held.values())), is_last=not len(_open_lanes))


def _kept_leaves(sources: Sequence[Source], settings: StorageSettings) -> frozenset[int]:
    """Return the remote leaves that fit into memory together, smallest first."""
    if settings.cache_shards:
        return frozenset()
    sizes = sorted(
        (len(source) * source.mean_sample_bytes, leaf)
        for leaf, source in enumerate(sources)
        if source.is_remote
    )
    room, kept = KEPT_SHARE * settings.read_ahead_bytes, set()
    for size, leaf in sizes:
        room -= size
        if room < 0:
            break
        kept.add(leaf)
    return frozenset(kept)


class DecodeAhead:
    """Decodes the blocks that lanes read now and next. Used by one thread.

    Args:
        sources: By leaf.
    """

    planned_blocks = 2

    def __init__(self, sources: Mapping[int, DecodesAhead]) -> None:
        self._sources = sources
        self._threads = WaitingThreads(1, "energon decode")

    def move_to(self, readings: Sequence[NextRows]) -> None:
        """Decode what is needed now, and what is needed next if as many rows are read again."""
        rows = [
            each.planned.pick(slice(block * each.number, (block + 1) * each.number))
            for block in range(self.planned_blocks)
            for each in readings
        ]
        leaf = np.concatenate([each.leaf for each in rows])
        ordinal = np.concatenate([each.ordinal for each in rows])
        own = {number: ordinal[leaf == number] for number in self._sources}
        used = [number for number, ordinals in own.items() if len(ordinals)]
        for number in used:
            self._sources[number].decode_ahead(
                own[number], self._threads.submit, max_bytes=DECODED_AHEAD_BYTES // len(used)
            )

    def take_counts(self) -> Mapping[str, int]:
        """Return nothing: there are no requests to count."""
        return {}
