"""Read samples of open shards: those with the same parts together, one column per part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from energon.arrays import Ints
from energon.errors import DecodeError, FormatError
from energon.formats.tables.part_table import PartTable
from energon.limits import TAR_PART_BYTES
from energon.samples.crude import (
    META_NAMES,
    RESERVED,
    CrudeSample,
    UnreadableSample,
    reserved_names,
)
from energon.samples.provenance import blank_source, fill_source
from energon.sources.shards import OpenShard, lazy_spans, read_columns
from energon.stages.lane import Block, BuiltBlock, release

MAX_LAZY_BYTES = 2 << 20
"""Up to this many bytes that were read together, parts are cut when they are needed. Beyond that,
they are cut at once, while the data is in the processor cache."""
T = TypeVar("T")


class PartNames:
    """Names of parts, compared without regard to case."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name.lower() for name in names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.names


class PartFilter:
    """The set of part names that a function accepts, which is called once for each name."""

    def __init__(self, accepts: Callable[[str], Any]) -> None:
        self.accepts = accepts
        self._known: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if name not in self._known:
            self._known[str(name)] = bool(self.accepts(str(name)))
        return self._known[str(name)]


Labels = tuple[Sequence[str], Sequence[tuple[int, ...]], Sequence[Any]]
"""A column for each name in `META_NAMES` but the key."""


@dataclass(frozen=True)
class SlicedRows:
    """Samples with the same parts, which are slices of buffers.

    Args:
        parts: The names of the parts that each sample has.
        keys: The key of each sample.
        buffers: Yields the buffer of each sample, once; samples may share one.
        edges: Where each part starts and where it stops in the buffer; shape (2, parts, samples).
    """

    parts: tuple[str, ...]
    keys: Sequence[str]
    buffers: Iterable[bytes]
    edges: Ints

    def rows(self, labels: Labels) -> list[CrudeSample]:
        """Return them as dicts."""
        columns = zip(self.keys, *labels, self.buffers, *self._bounds(self.edges), strict=False)
        rows: list[CrudeSample] = _row_builder(self.parts, *_slices(len(self.parts)))(columns)
        return rows

    def lazy(self, labels: Labels, order: Ints) -> Block:
        """Return them in another order as dicts that are made when their turn comes."""
        low, high = self.edges
        values, names = _slices(len(self.parts))
        if int((high - low).sum()) > MAX_LAZY_BYTES:
            contents = _cutter(values, names)(self.buffers, *self._bounds(self.edges))
            return _released_rows(self, contents, labels, order)
        meta = [in_order(self.keys, order), *labels]
        buffers = in_order(list(self.buffers), order)
        columns = [*meta, buffers, *self._bounds(self.edges[:, :, order])]
        return _ColumnsBlock(self.parts, values, names, columns)

    def _bounds(self, edges: Ints) -> list[list[int]]:
        return [each for part in range(len(self.parts)) for each in edges[:, part].tolist()]


@dataclass(frozen=True)
class WholeRows:
    """Samples with the same parts, each of which was read on its own.

    Args:
        parts: The names of the parts that each sample has.
        keys: The key of each sample.
        columns: A column for each part.
    """

    parts: tuple[str, ...]
    keys: Sequence[str]
    columns: Sequence[Sequence[bytes]]

    def rows(self, labels: Labels) -> list[CrudeSample]:
        """Return them as dicts."""
        names = _names(len(self.parts))
        columns = zip(self.keys, *labels, *self.columns, strict=False)
        rows: list[CrudeSample] = _row_builder(self.parts, names, names)(columns)
        return rows

    def lazy(self, labels: Labels, order: Ints) -> Block:
        """Return them in another order as dicts that are made when their turn comes."""
        contents = list(zip(*self.columns, strict=True)) or [()] * len(order)
        return _released_rows(self, contents, labels, order)


@dataclass(frozen=True)
class UnreadableRows:
    """Samples with parts that cannot be told apart, or that cannot be entries of a dict.

    Args:
        keys: The key of each sample.
        errors: Why each cannot be read.
    """

    keys: Sequence[str]
    errors: Sequence[DecodeError]

    def rows(self, labels: Labels) -> list[CrudeSample]:
        """Return them as dicts, which raise the errors when they are used."""
        rows = zip(self.errors, self.keys, *labels, strict=False)
        return [
            UnreadableSample(dict(zip(META_NAMES, entries, strict=True)), error)
            for error, *entries in rows
        ]

    def lazy(self, labels: Labels, order: Ints) -> Block:
        """Return them in another order as dicts. `labels` are in this order already."""
        reordered = UnreadableRows(in_order(self.keys, order), in_order(self.errors, order))
        return BuiltBlock(reordered.rows(labels))


def in_order(column: Sequence[T], order: Ints) -> list[T]:
    """Return the values of a column in some order."""
    return list(map(column.__getitem__, order.tolist()))


def _released_rows(
    rows: SlicedRows | WholeRows, contents: Sequence[tuple[bytes, ...]], labels: Labels, order: Ints
) -> Block:
    """Return `rows`, which have these `contents`, as dicts that are made when their turn comes.

    Their parts are released as they are passed on. `labels` are in `order` already.
    """
    values = _names(len(rows.parts))
    names = (f"({''.join(f'{value}, ' for value in values)})",)
    columns = [in_order(rows.keys, order), *labels]
    return _ColumnsBlock(rows.parts, values, names, columns, contents=in_order(contents, order))


@dataclass(frozen=True)
class _ColumnsBlock(Block):
    """Samples that are made of columns when they are taken; see `_row_builder`."""

    parts: tuple[str, ...]
    values: tuple[str, ...]
    names: tuple[str, ...]
    columns_of_rows: Sequence[Sequence[Any]]
    dataset_path: str | None = None
    """The dataset of the samples, if it is to be recorded in them."""
    contents: list[Any] | None = None
    """One more column, which is released as samples are taken."""

    def samples(self, start: int, stop: int) -> list[CrudeSample]:
        columns = list(map(itemgetter(slice(start, stop)), self.columns_of_rows))
        if self.contents is not None:
            columns.append(release(self.contents, start, stop))
        rows: list[CrudeSample] = self._build(zip(*columns, strict=False), self.dataset_path)
        return rows

    @cached_property
    def _build(self) -> Callable[..., Any]:
        with_sources = self.dataset_path is not None
        return _row_builder(self.parts, self.values, self.names, with_sources=with_sources)

    def with_sources(self, dataset_path: str) -> _ColumnsBlock:
        return replace(self, dataset_path=dataset_path)


@lru_cache(maxsize=64)
def _slices(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return source code for the values of parts, and names for the columns that it uses."""
    values = tuple(f"buffer[a{index}:b{index}]" for index in range(count))
    return values, ("buffer", *(f"{edge}{index}" for index in range(count) for edge in "ab"))


def _names(count: int) -> tuple[str, ...]:
    """Return names for the columns of parts that already exist."""
    return tuple(f"c{index}" for index in range(count))


@lru_cache(maxsize=1024)
def _cutter(values: tuple[str, ...], names: tuple[str, ...]) -> Callable[..., Any]:
    """Compile a function of columns that returns a tuple of values per row, in a list."""
    columns = ", ".join(f"_{index}" for index in range(len(names)))
    loop = f"({', '.join(values)},) for {', '.join(names)} in zip({columns})"
    cutter: Callable[..., Any] = eval(f"lambda {columns}: [{loop}]")
    return cutter


@lru_cache(maxsize=1024)
def _row_builder(
    parts: tuple[str, ...],
    values: tuple[str, ...],
    names: tuple[str, ...],
    *,
    with_sources: bool = False,
) -> Callable[..., Any]:
    """Compile a function of rows of columns that returns a dict for each.

    Names of parts come from data, so they appear in the source as string literals only. With
    `with_sources`, each row records its origin: the function then takes the dataset, too. Doing it
    here takes a third of the time of doing it later, one sample after the other.

    Args:
        parts: The names of the parts that each sample has.
        values: Source code for the value of each.
        names: What that calls the columns behind those in `META_NAMES`. A name may be a tuple of
            names, for a column of tuples.
        with_sources: Whether each row records its origin.

    Returns:
        A function of an iterator over rows, which takes the dataset, too.
    """
    meta = tuple(f"m{index}" for index in range(len(META_NAMES)))
    keys, given = (*META_NAMES, *parts), (*meta, *values)
    more = ""
    if with_sources:
        keys, given = (*keys, "__sources__"), (*given, "(source,)")
        key, shard, restore_key, _ = meta
        origin = f"(dataset_path, {key}, {restore_key}, {shard}, {parts!r})"
        more = f" for source in (blank_source(),) if fill_source(source, {origin}) is None"
    fields = ", ".join(f"{key!r}: {value}" for key, value in zip(keys, given, strict=True))
    row = f"CrudeSample({{{fields}}})"
    each = f"for {', '.join((*meta, *names))} in rows{more}"
    source = f"lambda rows, dataset_path=None: [{row} {each}]"
    builder: Callable[..., Any] = eval(source, dict(_OF_ROWS))
    return builder


_OF_ROWS = {
    "CrudeSample": CrudeSample,
    "blank_source": blank_source,
    "fill_source": fill_source,
}
ReadRows = SlicedRows | WholeRows | UnreadableRows
LARGE_PART_BYTES = 32 << 10
"""From this size on, parts are read into separate bytes: a copy would cost more than a call."""


class _Piece(NamedTuple):
    """Samples of one shard that have the same parts."""

    shard: OpenShard
    requested: Ints
    """Where in the request they are."""
    numbers: Ints
    """The numbers of their parts in the table, shape (parts, samples)."""

    def extents(self) -> tuple[Ints, Ints]:
        """Return where the parts start, and their sizes."""
        table, file, most, _ = self.shard
        starts, sizes = table.extents(self.numbers)
        if table.shard_size > most and sizes.max(initial=0) > most:
            raise FormatError(
                f"{file.path}: has a part of {sizes.max()} bytes, expected at most {most}; "
                f"{TAR_PART_BYTES.hint}"
            )
        return starts, sizes


def read_shards(
    shards: Iterable[tuple[OpenShard, int]],
    indices: Ints,
    parts: PartNames | PartFilter | None = None,
) -> list[tuple[Ints, ReadRows]]:
    """Return samples of shards, those with the same parts together.

    Of large samples, a block has a dozen from each shard: calls of numpy for each shard would take
    as long as reading, so they are made for all shards together.

    Args:
        shards: Open shards, each with how many of the samples are its own.
        indices: Numbers of the samples in their shards, ascending in each.
        parts: Which parts to read; None reads all.

    Returns:
        For each set of parts, which of the requested samples have it, and these samples. Samples
        that have a part twice, or one with a reserved name, are unreadable.

    Raises:
        TruncatedError: If a shard ends too early.
    """
    groups: dict[tuple[str, ...], list[_Piece]] = {}
    unreadable: list[tuple[Ints, ReadRows]] = []
    chosen: dict[tuple[str, ...], tuple[tuple[str, ...], Ints]] = {}
    all_requested, stop = np.arange(len(indices)), 0
    for shard, count in shards:
        start, stop = stop, stop + count
        for schema, requested, first in _by_schema(
            shard.table, indices[start:stop], all_requested[start:stop]
        ):
            if schema not in chosen:
                chosen[schema] = _choose(schema, parts)
            names, columns = chosen[schema]
            if reserved_names(names) or len(set(schema)) != len(schema):
                unreadable.append((requested, _unreadable(shard, names, indices[requested])))
                continue
            groups.setdefault(names, []).append(_Piece(shard, requested, columns + first))
    return unreadable + [_read_pieces(*group, indices) for group in groups.items()]


def _choose(
    schema: tuple[str, ...], parts: PartNames | PartFilter | None
) -> tuple[tuple[str, ...], Ints]:
    """Return which parts of a sample to read, and their numbers in it as a column."""
    chosen = [n for n, name in enumerate(schema) if parts is None or name in parts]
    return tuple(schema[n] for n in chosen), np.array(chosen, np.int64)[:, None]


def _unreadable(shard: OpenShard, names: tuple[str, ...], indices: Ints) -> UnreadableRows:
    """Return samples of a shard that have a part twice, or one of `names` that is reserved."""
    table, path = shard.table, shard.file.path
    keys = table.keys(indices)
    errors: list[DecodeError] = []
    for key, index in zip(keys, indices, strict=True):
        if repeated := table.repeated_parts(index[None]):
            errors.append(DecodeError(str(repeated[0].error(path))))
        else:
            reserved = reserved_names(names)[0]
            errors.append(
                DecodeError(f"{path}: sample {key!r} has a part named {reserved!r}, {RESERVED}")
            )
    return UnreadableRows(keys, errors)


def _read_pieces(
    names: tuple[str, ...], pieces: Sequence[_Piece], indices: Ints
) -> tuple[Ints, ReadRows]:
    """Return which of the requested samples have these parts, and these samples."""
    requested = np.concatenate([piece.requested for piece in pieces])
    keys: list[str] = []
    for piece in pieces:
        keys += piece.shard.table.keys(indices[piece.requested])
    if not names:
        return requested, WholeRows(names, keys, ())
    extents = [piece.extents() for piece in pieces]
    starts, sizes = (np.concatenate(each, axis=1) for each in zip(*extents, strict=True))
    files = [(piece.shard.file, len(piece.requested)) for piece in pieces]
    is_remote = files[0][0].is_remote
    if not is_remote and sizes.max(axis=0).sum() >= LARGE_PART_BYTES * len(requested):
        return requested, WholeRows(names, keys, read_columns(files, starts, sizes))
    stops = starts + sizes
    buffers, base = lazy_spans(files, starts.min(axis=0), stops.max(axis=0))
    return requested, SlicedRows(names, keys, buffers, np.array((starts, stops)) - base)


def _by_schema(
    table: PartTable, indices: Ints, requested: Ints
) -> Iterable[tuple[tuple[str, ...], Ints, Ints]]:
    """Group samples by the parts that they have.

    Yields:
        The names of the parts, the requested samples that have them, and for each of these the
        number of its first part in the table.
    """
    if table.common_parts is not None:
        yield table.common_parts, requested, indices * len(table.common_parts)
        return
    first = table.first_part[indices].astype(np.int64)
    counts = table.first_part[indices + 1].astype(np.int64) - first
    for count in sorted(set(counts.tolist())):
        rows = np.flatnonzero(counts == count)
        names = table.part_name[first[rows][:, None] + np.arange(count)]
        while len(rows):
            same = (names == names[0]).all(axis=1)
            schema = tuple(table.part_names[name] for name in names[0].tolist())
            yield schema, requested[rows[same]], first[rows[same]]
            rows, names = rows[~same], names[~same]
