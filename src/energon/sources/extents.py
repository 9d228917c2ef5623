"""Choose the parts of samples to read, locate them, and read them with few calls."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.formats.tables.part_table import PartTable
from energon.io.range_file import RangeFile


class PartNames:
    """Names of parts, compared without regard to case.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name.lower() for name in names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.names

    def issuperset(self, names: Iterable[str]) -> bool:
        """Return whether all of the names are among them."""
        return all(name in self for name in names)


class PartFilter:
    """The set of part names that a function accepts.

    Args:
        accepts: Returns whether to read the part with a name. Called once for each name.
    """

    def __init__(self, accepts: Callable[[str], Any]) -> None:
        self.accepts = accepts
        self._known: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if name not in self._known:
            self._known[str(name)] = bool(self.accepts(str(name)))
        return self._known[str(name)]

    def issuperset(self, names: Iterable[str]) -> bool:
        """Return whether all of the names are accepted."""
        return all(name in self for name in names)


SKIPPED_GAP_BYTES = 16 << 10
"""Bytes between two samples that are read along rather than skipped."""
MAX_SPAN_BYTES = 4 << 20
"""Maximum size of one read in bytes."""
LOCAL_SPAN_BYTES = 512 << 10
"""The same for local files. Cutting samples of 12 small parts out of spans that fit into the cache
of a core takes 6.5 µs a sample, out of spans of 4 MiB 9 µs."""


SMALL_PART_BYTES = 4 << 10
"""Up to this size, parts next to each other are read together: a call costs more than a copy."""


def read_spans(
    file: RangeFile, low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[list[bytes], NDArray[np.int64]]:
    """Read samples at `low` to `high`, ascending, with few calls.

    Returns:
        The buffer that each sample is in, and the position in the file where the buffer begins.
    """
    buffers, begin = lazy_spans(file, low, high)
    return list(buffers), begin


def lazy_spans(
    file: RangeFile, low: NDArray[np.int64], high: NDArray[np.int64]
) -> tuple[Iterator[bytes], NDArray[np.int64]]:
    """Do the same, but read from a local file only when the turn of a buffer comes.

    What is cut out of a buffer right after it was read is still in the cache of the processor.
    Requests to a store are made at once, since they wait for each other.
    """
    max_span = MAX_SPAN_BYTES if file.is_remote else LOCAL_SPAN_BYTES
    edges = span_edges(low, high, max_span=max_span)
    begin = low[edges]
    size = np.maximum.reduceat(high, edges) - begin
    spans: Iterable[bytes]
    if file.is_remote:
        spans = file.pread_many(begin.tolist(), size.tolist())
    else:
        spans = map(file.pread, begin.tolist(), size.tolist())
    if len(edges) == len(low):
        return iter(spans), low
    counts = np.diff(edges, append=len(low))
    return chain.from_iterable(map(repeat, spans, counts.tolist())), np.repeat(begin, counts)


def span_edges(
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    *,
    max_gap: int = SKIPPED_GAP_BYTES,
    max_span: int = MAX_SPAN_BYTES,
) -> NDArray[np.int64]:
    """Return which of the samples at `low` to `high`, ascending, start a new call."""
    cut = (low[1:] - high[:-1] > max_gap) | (low[1:] // max_span != low[:-1] // max_span)
    return np.concatenate(([0], np.flatnonzero(cut) + 1))


def read_columns(file: RangeFile, starts: Ints, sizes: Ints) -> list[Sequence[bytes]]:
    """Return the parts of samples with large parts, a column per part.

    Small parts that lie side by side, such as a caption and metadata, take one call a sample. Which
    ones do is decided by the first sample, since the others are like it.
    """
    if not len(starts):
        return [()] * starts.shape[1]
    columns: list[Sequence[bytes]] = []
    for part, stop in _runs_of_small_parts(starts[0].tolist(), sizes[0].tolist()):
        begins, lengths = starts[:, part:stop], sizes[:, part:stop]
        if stop - part == 1:
            columns.append(list(map(file.pread, begins[:, 0].tolist(), lengths[:, 0].tolist())))
            continue
        low = begins.min(axis=1)
        edges = begins - low[:, None]
        ends = edges + lengths
        runs = list(map(file.pread, low.tolist(), ends.max(axis=1).tolist()))
        columns += [
            [run[a:b] for run, a, b in zip(runs, low_edges, high_edges, strict=True)]
            for low_edges, high_edges in zip(edges.T.tolist(), ends.T.tolist(), strict=True)
        ]
    return columns


def _runs_of_small_parts(starts: list[int], sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts to be read together: the first of them, and the one after the last.

    Example:
        >>> list(_runs_of_small_parts([0, 90_112, 91_136], [90_000, 40, 300]))
        [(0, 1), (1, 3)]
    """
    first = 0
    for part in range(1, len(starts) + 1):
        if part < len(starts):
            gap = starts[part] - starts[part - 1] - sizes[part - 1]
            if max(sizes[part - 1 : part + 1]) <= SMALL_PART_BYTES and 0 <= gap < SMALL_PART_BYTES:
                continue
        yield first, part
        first = part


class Extents(NamedTuple):
    """Where samples of one shard are."""

    file: RangeFile
    places: Ints
    """Which of the requested samples these are."""
    low: Ints
    """The first byte needed of each."""
    high: Ints
    """The byte after the last one needed of each."""


def selected_extents(
    table: PartTable, indices: Ints, parts: Container[str] | None
) -> tuple[Ints, Ints]:
    """Return the range in which to read samples of a shard.

    Args:
        table: Part table of the shard.
        indices: Numbers of samples in it.
        parts: Names of the parts to read; None for all.
    """
    names = table.common_parts
    if names is not None:
        selected = [at for at, name in enumerate(names) if parts is None or name in parts]
        if selected:
            numbers = indices[:, None] * len(names) + np.array(selected)
            begin, size = table.extents(numbers)
            return begin.min(axis=1), (begin + size).max(axis=1)
    # Samples with different parts are read with everything they contain.
    return table.sample_extents(indices)
