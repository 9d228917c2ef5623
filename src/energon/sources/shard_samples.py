"""Read samples of one open shard: those with the same parts together, one column per part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable
from energon.io.range_file import RangeFile
from energon.limits import TAR_PART_BYTES
from energon.samples.crude import CrudeSample, blank_source, fill_source
from energon.sources.shards import OpenShard, lazy_spans, read_columns
from energon.stages.reading.blocks import LazyLeafRows, ReleasedRows, released

META_NAMES = ("__key__", "__shard__", "__restore_key__", "__subflavors__")


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


@dataclass(frozen=True)
class SlicedRows:
    """Samples with the same parts, which are slices of buffers.

    Args:
        parts: The names of the parts that each sample has.
        meta: A column for each name in `META_NAMES`.
        buffers: Yields the buffer of each sample, once; samples may share one.
        edges: Where each part starts and where it stops in the buffer; shape (2, samples, parts).
    """

    parts: tuple[str, ...]
    meta: Sequence[Sequence[Any]]
    buffers: Iterable[bytes]
    edges: Ints

    def __len__(self) -> int:
        return int(self.edges.shape[1])

    @property
    def num_bytes(self) -> int:
        """How many bytes the parts have."""
        low, high = self.edges
        return int((high - low).sum())

    def rows(self) -> list[CrudeSample]:
        """Return them as dicts."""
        return slice_rows(self.parts, self.meta, self.buffers, self._bounds())

    def contents(self) -> list[tuple[bytes, ...]]:
        """Return the parts of each, cut out of its buffer as soon as that is read."""
        values, names = _slices(len(self.parts))
        cut: list[tuple[bytes, ...]] = _cutter(values, names)(self.buffers, *self._bounds())
        return cut

    def lazy(self) -> LazyLeafRows:
        """Return them as dicts that are made when their turn comes."""
        values, names = _slices(len(self.parts))
        columns = [*self.meta, list(self.buffers), *self._bounds()]
        return _LazyRows(self.parts, values, names, columns)

    def _bounds(self) -> list[list[int]]:
        low, high = self.edges
        return [edge[:, part].tolist() for part in range(len(self.parts)) for edge in (low, high)]


@dataclass(frozen=True)
class WholeRows:
    """Samples with the same parts, each of which was read on its own.

    Args:
        parts: The names of the parts that each sample has.
        meta: A column for each name in `META_NAMES`.
        columns: A column for each part.
    """

    parts: tuple[str, ...]
    meta: Sequence[Sequence[Any]]
    columns: Sequence[Sequence[bytes]]

    def __len__(self) -> int:
        return len(self.columns[0])

    def rows(self) -> list[CrudeSample]:
        """Return them as dicts."""
        return join_rows(self.parts, self.meta, self.columns)

    def contents(self) -> list[tuple[bytes, ...]]:
        """Return the parts of each."""
        return list(zip(*self.columns, strict=True))


def lazy_rows(
    parts: tuple[str, ...], meta: Sequence[Sequence[Any]], contents: Sequence[tuple[bytes, ...]]
) -> LazyLeafRows:
    """Return samples of parts that already exist as dicts that are made when their turn comes.

    Their parts are released as they are passed on.

    Args:
        parts: The names of the parts that each sample has.
        meta: A column for each name in `META_NAMES`.
        contents: The parts of each sample.
    """
    values = tuple(f"c{index}" for index in range(len(parts)))
    return _ReleasedRows(parts, values, (f"({', '.join(values)},)",), [*meta, contents])


@dataclass(frozen=True)
class _LazyRows:
    """Samples that are made of columns when their turn comes; see `_row_builder`."""

    parts: tuple[str, ...]
    values: tuple[str, ...]
    names: tuple[str, ...]
    columns: Sequence[Sequence[Any]]
    dataset_path: str | None = None
    """The dataset of the samples, if it is to be recorded in them."""

    def between(self, start: int, stop: int) -> _NextRows:
        """Return the samples from `start` to `stop`, one by one or many at once."""
        # Without a reference to this, which has the parts of samples that were released.
        rows = zip(*self._columns(start, stop), strict=False)
        return _NextRows(self._builder, rows, self.dataset_path)

    @cached_property
    def _builder(self) -> Callable[[str], Callable[..., Any]]:
        with_sources = self.dataset_path is not None
        return partial(_row_builder, self.parts, self.values, self.names, with_sources=with_sources)

    def _columns(self, start: int, stop: int) -> list[Iterable[Any]]:
        return [column[start:stop] for column in self.columns]

    def with_sources(self, dataset_path: str) -> _LazyRows:
        """Return the same samples, with the origin of each."""
        return replace(self, dataset_path=dataset_path)


@dataclass(frozen=True)
class _ReleasedRows(_LazyRows, ReleasedRows):
    """The same, of which the last column is released as they are made."""

    def _columns(self, start: int, stop: int) -> list[Iterable[Any]]:
        *columns, contents = super()._columns(start, stop)
        return [*columns, released(list(contents))]


class _NextRows(Iterator[CrudeSample]):
    """The next of some lazy samples.

    Many at once take a list comprehension, which does not switch frames for each as a generator
    does.
    """

    __slots__ = ("_builder", "_rows", "take")

    def __init__(
        self,
        builder: Callable[[str], Callable[..., Any]],
        rows: Iterator[tuple[Any, ...]],
        dataset_path: str | None,
    ) -> None:
        self._builder, self._rows = builder, (rows, dataset_path)
        self.take: Callable[[int], list[CrudeSample]] = partial(builder("[]"), rows, dataset_path)
        """Return the next samples: that many, or as many as are left."""

    def __next__(self) -> CrudeSample:
        for sample in self.take(1):
            return sample
        raise StopIteration

    def __iter__(self) -> Iterator[CrudeSample]:
        rows: Iterator[CrudeSample] = self._builder("()")(*self._rows)
        return rows


def slice_rows(
    parts: tuple[str, ...],
    meta: Sequence[Sequence[Any]],
    buffers: Iterable[bytes],
    bounds: Sequence[Sequence[int]],
) -> list[CrudeSample]:
    """Return samples whose parts are slices of buffers.

    Args:
        parts: The names of the parts that each sample has.
        meta: A column for each name in `META_NAMES`.
        buffers: Yields the buffer of each sample; samples may share one.
        bounds: Two columns for each part: where it starts and where it stops in the buffer.
    """
    values, names = _slices(len(parts))
    rows: list[CrudeSample] = _row_builder(parts, values, names)(
        zip(*meta, buffers, *bounds, strict=False)
    )
    return rows


@lru_cache(maxsize=64)
def _slices(count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return source code for the values of parts, and names for the columns that it uses."""
    values = tuple(f"buffer[a{index}:b{index}]" for index in range(count))
    return values, ("buffer", *(f"{edge}{index}" for index in range(count) for edge in "ab"))


def join_rows(
    parts: tuple[str, ...], meta: Sequence[Sequence[Any]], contents: Sequence[Sequence[bytes]]
) -> list[CrudeSample]:
    """Return samples of parts that already exist; `contents` has a column for each name."""
    names = tuple(f"c{index}" for index in range(len(parts)))
    rows: list[CrudeSample] = _row_builder(parts, names, names)(zip(*meta, *contents, strict=False))
    return rows


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
    brackets: str = "[]",
    *,
    with_sources: bool = False,
) -> Callable[..., Any]:
    """Compile a function of rows of columns that returns a dict for each, in a list or a generator.

    Names of parts come from data, so they appear in the source as string literals only. With
    `with_sources`, each row records its origin: the function then takes the dataset, too. Doing it
    here takes a third of the time of doing it later, one sample after the other.

    Args:
        parts: The names of the parts that each sample has.
        values: Source code for the value of each.
        names: What that calls the columns behind those in `META_NAMES`. A name may be a tuple of
            names, for a column of tuples.
        brackets: Of a list or of a generator.
        with_sources: Whether each row records its origin.

    Returns:
        A function of an iterator over rows, which takes the dataset and how many rows to take, too;
        None for all.
    """
    meta = tuple(f"m{index}" for index in range(len(META_NAMES)))
    keys, given = (*META_NAMES, *parts), (*meta, *values)
    more = ""
    if with_sources:
        keys, given = (*keys, "__sources__"), (*given, "(source,)")
        key, shard, restore_key, _ = meta
        known = f"(dataset_path, {key}, {restore_key}, {shard}, {parts!r})"
        more = f" for source in (blank_source(),) if fill_source(source, {known}) is None"
    fields = ", ".join(f"{key!r}: {value}" for key, value in zip(keys, given, strict=True))
    row = f"CrudeSample({{{fields}}})"
    each = f"for {', '.join((*meta, *names))} in islice(rows, count){more}"
    source = f"lambda rows, dataset_path=None, count=None: {brackets[0]}{row} {each}{brackets[1]}"
    builder: Callable[..., Any] = eval(source, dict(_OF_ROWS))
    return builder


_OF_ROWS = {
    "islice": islice,
    "CrudeSample": CrudeSample,
    "blank_source": blank_source,
    "fill_source": fill_source,
}

ReadRows = SlicedRows | WholeRows | list[CrudeSample]
"""Samples of a shard; a list if they have different parts."""
LARGE_PART_BYTES = 32 << 10
"""From this size on, parts are read into separate bytes: a copy would cost more than a call."""
RESERVED_PARTS = frozenset(META_NAMES)


def read_shard(
    shard: OpenShard,
    indices: NDArray[np.int64],
    notes: tuple[Iterable[str], Sequence[Any], Iterable[Any]],
    *,
    parts: PartNames | PartFilter | None = None,
) -> ReadRows:
    """Return samples of a shard.

    Args:
        shard: The shard.
        indices: Numbers of the samples in it, ascending.
        notes: What to record in each: name of the shard, restore key and subflavors.
        parts: Which parts to read; None reads all.

    Raises:
        FormatError: If the name of a part is reserved.
        DuplicateSampleKeyError: If a sample has a part twice.
        TruncatedError: If the shard ends too early.
    """
    table, file = shard.table, shard.file
    names = table.common_parts
    if names is not None:
        _check_different(file, table, names, indices)
        numbers = indices[:, None] * len(names) + np.arange(len(names))
        return _read_parts(shard, names, numbers, (table.keys(indices), *notes), parts)
    shards, restore_keys, subflavors = notes[0], list(notes[1]), notes[2]
    samples: list[Any] = [None] * len(indices)
    for names, rows, numbers in _by_schema(table, indices):
        _check_different(file, table, names, indices[rows])
        keys = [restore_keys[row] for row in rows.tolist()]
        meta = (table.keys(indices[rows]), shards, keys, subflavors)
        found = _read_parts(shard, names, numbers, meta, parts)
        found = found if isinstance(found, list) else found.rows()
        for row, sample in zip(rows.tolist(), found, strict=True):
            samples[row] = sample
    return samples


def _check_different(
    file: RangeFile, table: PartTable, names: tuple[str, ...], indices: NDArray[np.int64]
) -> None:
    """Raise DuplicateSampleKeyError if samples with these parts have one of them twice."""
    if len(set(names)) != len(names) and len(indices):
        raise table.repeated_parts(indices[:1])[0].error(file.path)


def _read_parts(
    shard: OpenShard,
    names: tuple[str, ...],
    numbers: NDArray[np.int64],
    meta: Sequence[Any],
    chosen: PartNames | PartFilter | None,
) -> ReadRows:
    """Return samples with these parts, a row of numbers per sample and a column per name."""
    table, file, most = shard
    if chosen is not None and not chosen.issuperset(names):
        places = [place for place, name in enumerate(names) if name in chosen]
        names, numbers = tuple(names[place] for place in places), numbers[:, places]
    if not names:
        return join_rows((), meta, ())
    if not RESERVED_PARTS.isdisjoint(names):
        raise FormatError(
            f"{file.path}: samples have a part named {min(RESERVED_PARTS.intersection(names))!r}, "
            "a name that energon reserves for itself; rename it in the shard, or exclude it "
            "with a field_map"
        )
    starts, sizes = table.extents(numbers)
    if table.shard_size > most and sizes.max() > most:
        raise FormatError(
            f"{file.path}: has a part of {sizes.max()} bytes, expected at most {most}; "
            f"{TAR_PART_BYTES.hint}"
        )
    if not file.is_remote and sizes.max(axis=1).sum() >= LARGE_PART_BYTES * len(numbers):
        return WholeRows(names, meta, read_columns(file, starts, sizes))
    stops = starts + sizes
    buffers, base = lazy_spans(file, starts.min(axis=1), stops.max(axis=1))
    edges = np.stack((starts - base[:, None], stops - base[:, None]))
    return SlicedRows(names, meta, buffers, edges)


def _by_schema(
    table: PartTable, indices: NDArray[np.int64]
) -> Iterable[tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]]:
    """Group samples by the parts that they have.

    Yields:
        The names of the parts, the places in `indices` of the samples that have them, and the
        numbers of their parts with shape (samples, names).
    """
    first = table.first_part[indices].astype(np.int64)
    counts = table.first_part[indices + 1].astype(np.int64) - first
    for count in sorted(set(counts.tolist())):
        rows = np.flatnonzero(counts == count)
        parts = first[rows][:, None] + np.arange(count)
        names = table.part_name[parts]
        while len(rows):
            same = (names == names[0]).all(axis=1)
            schema = tuple(table.part_names[name] for name in names[0].tolist())
            yield schema, rows[same], parts[same]
            rows, parts, names = rows[~same], parts[~same], names[~same]
