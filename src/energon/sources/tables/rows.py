"""Rows of tables as samples, whatever files they are in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.decode.sample_decoder import is_decoded
from energon.errors import ConfigError, DecodeError
from energon.formats.meta.info import numbers_in, ratio_range
from energon.io.epath import AnyPath
from energon.messages import counted, warn_once
from energon.samples.crude import META_NAMES, PART_FILES, CrudeSample, UnreadableSample
from energon.samples.provenance import record_sources
from energon.sources.source import (
    Extents,
    FileSamples,
    Location,
    SampleSelection,
    content_fingerprint,
)
from energon.sources.tables.columns import (
    RowGroups,
    RowTable,
    class_name,
    class_names,
    is_data,
    is_number,
)
from energon.sources.tables.row_kind import PartSource, RestoreKeys, RowOptions, file_of_part
from energon.stages.lane import Block, release

logger = logging.getLogger("energon")

MAX_HELD_BYTES = 256 << 20
"""Bytes of samples that were read but not taken yet, and of the row groups that they keep."""


class RowSource(PartSource):
    """The rows of a split of some files, numbered from 0.

    A sample has a part for each column, and for each `key=value` in the path of its file. Its key
    is the name of the file without its suffix, a slash, and the number of the row in the file.

    Args:
        path: Path or address of the dataset.
        groups: The rows of the files that the split is in.
        selection: Which samples to read, and which columns if `options` say none.
        options: Which columns are read, and which splits there are.
        by_ratio: Whether a ratio selects some of the rows; otherwise the split has all of them.

    Raises:
        FormatError: If the values of a column cannot have the same type in all files.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
    """

    part_noun: ClassVar[str] = "column"

    def __init__(
        self,
        path: AnyPath,
        groups: RowGroups,
        selection: SampleSelection,
        options: RowOptions,
        *,
        by_ratio: bool,
    ) -> None:
        self.groups = groups
        self.options = options
        self.names = [footer.name for footer in groups.footers]
        total = int(groups.ends[-1])
        origin = options.origin or str(path)
        bounds = (0, total)
        if by_ratio:
            split = selection.split_part
            bounds = ratio_range(options.split, split, total, what="rows", origin=origin)
        super().__init__(path, selection, bounds=bounds)
        self.chosen_parts = self.parts_to_read(selection.parts, options.columns)
        self.columns = self._columns_to_read()

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Average size of a row in the columns to read, in bytes, over the first group."""
        groups = np.flatnonzero(np.diff(self.groups.ends))[:1]
        size = sum(b - a for a, b in self.groups.chunks(int(groups[0]), self.columns))
        return size / float(np.diff(self.groups.ends)[groups[0]])

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        content = {
            "files": [[each.name, each.size, list(each.rows)] for each in self.groups.footers],
            "excluded": self.excluded.tolist(),
            "range": [self.first, self.last, self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def read_numbers(
        self, numbers: Ints, keys: RestoreKeys, subflavors: Mapping[str, Any] | None
    ) -> Block:
        """Read samples; bytes are copied when they are made.

        If their values are large, which the size of the file need not tell, each sample is read
        when it is taken.
        """
        groups = self._groups_of(numbers)
        samples: list[Any] = [None] * len(numbers)
        paths: list[Any] = [None] * len(numbers)
        held = size = 0
        for group in distinct(groups).tolist():
            requested = np.flatnonzero(groups == group)
            file = int(self.groups.file[group])
            name = self.groups.footers[file].name
            stem, base = name.removesuffix(self.groups.suffix), int(self.groups.file_ends[file])
            table = self.groups.table(group, self.columns)
            inside = numbers[requested] - self.groups.ends[group]
            size += table.value_bytes(inside)
            if size > MAX_HELD_BYTES and len(numbers) > 1:
                return _UnreadBlock(self, numbers, keys, subflavors)
            self.groups.count_taken(group, self.columns, len(requested))
            values, own_paths, failures = self._values(table, inside)
            given = {
                key: own[file] for key, own in self.groups.partitions.items() if self.takes(key)
            }
            has_files = bool(own_paths) or any(map(_holds_bytes, values.values()))
            taken = zip(
                requested.tolist(),
                (numbers[requested] - base).tolist(),
                _by_row(values, len(requested)),
                _by_row(own_paths, len(requested)),
                strict=True,
            )
            for index, row, own, files in taken:
                samples[index] = CrudeSample(
                    {
                        "__key__": f"{stem}/{row}",
                        "__shard__": name,
                        "__restore_key__": keys[index],
                        "__subflavors__": subflavors,
                        **dict(zip(values, own, strict=True)),
                        **given,
                    }
                )
                if has_files:
                    paths[index] = dict(zip(own_paths, files, strict=True))
            for number, (column, problem) in failures.items():
                index = int(requested[number])
                row = int(numbers[index]) - base
                samples[index] = _unreadable(
                    samples[index],
                    f"{self.groups.origin(file)}: row {row} has a value in column {column!r} "
                    f"that cannot be read: {problem}",
                )
                paths[index] = None
            held += table.num_bytes
            if held > MAX_HELD_BYTES:
                # A view would keep its whole row group in memory.
                for index in requested.tolist():
                    _copy_bytes(samples[index])
        return _TableBlock(samples, paths)

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the row groups of samples are, as far as their columns are read."""
        rows = self.numbers(ordinals)
        groups = self._groups_of(rows)
        low, high = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for group in distinct(groups).tolist():
            chunks = self.groups.chunks(group, self.columns)
            if not chunks:
                continue
            needed = sum(stop - start for start, stop in chunks)
            if chunks[-1][1] - chunks[0][0] > 2 * needed:
                chunks = [max(chunks, key=lambda each: each[1] - each[0])]
            low[groups == group], high[groups == group] = chunks[0][0], chunks[-1][1]
        number = self.groups.file[groups]
        for each in distinct(number).tolist():
            inside = np.flatnonzero((number == each) & (high > low))
            order = inside[np.argsort(low[inside], kind="stable")]
            yield Extents(self.groups.range_file(each), order, low[order], high[order])

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return a numeric column of rows, in the order of `ordinals`; None if there is none.

        Raises:
            ConfigError: If a row has no value.
        """
        if name not in self.measure_names():
            return None
        rows = self.numbers(ordinals)
        groups, values = self._groups_of(rows), np.empty(len(rows))
        for group in distinct(groups).tolist():
            requested = np.flatnonzero(groups == group)
            table = self.groups.table(group, (name,))
            self.groups.count_taken(group, (name,), len(requested))
            column, _, _ = table.values(name, rows[requested] - self.groups.ends[group])
            values[requested] = np.array(column, np.float64)  # NaN for None
        if np.isnan(values).any():
            key = self.keys(ordinals[np.isnan(values)][:1])[0]
            raise ConfigError(
                f"{self.path}: row {key!r} has no value in column {name!r}, which is used as a "
                "measure; exclude such rows, or store a measure with `energon measure`"
            )
        return values

    def measure_names(self) -> list[str]:
        """Return the names of the numeric columns."""
        return [field.name for field in self.groups.schema if is_number(field.type)]

    def file_samples(self) -> list[FileSamples]:
        """Return the files, and which of their rows the split has."""
        ranges = self.ranges()[1]
        counts = np.diff(self.groups.file_ends).tolist()
        return [
            FileSamples(name, count, *ranges.get(name, (0, 0)))
            for name, count in zip(self.names, counts, strict=True)
        ]

    def in_files(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Return the number of the file of each row, and that of the row in its file."""
        rows = self.numbers(ordinals)
        files = self.groups.file[self._groups_of(rows)]
        return files, rows - self.groups.file_ends[files]

    def file_stamp(self, number: int) -> str:
        """Return the size of a file, and the rows of its groups."""
        footer = self.groups.footers[number]
        return f"{footer.size}-{sum(footer.rows)}-{len(footer.rows)}"

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is; the offset is that of its row group."""
        row = int(self.numbers(np.array([ordinal]))[0])
        group = int(self._groups_of(np.array([row]))[0])
        number = int(self.groups.file[group])
        name = self.groups.footers[number].name
        own = row - int(self.groups.file_ends[number])
        chunks = self.groups.chunks(group, self.columns)
        return Location(
            key=f"{name.removesuffix(self.groups.suffix)}/{own}",
            shard=name,
            sample=own,
            offset=chunks[0][0] if chunks else 0,
            parts=tuple(self.part_names),
        )

    def keys(self, ordinals: Ints) -> list[str]:
        rows = self.numbers(ordinals)
        files = self.groups.file[self._groups_of(rows)]
        numbers = (rows - self.groups.file_ends[files]).tolist()
        stems = [name.removesuffix(self.groups.suffix) for name in self.names]
        return [f"{stems[file]}/{n}" for file, n in zip(files.tolist(), numbers, strict=True)]

    def numbers_of(self, key: str) -> Sequence[int]:
        if key in self.names:
            return range(*self.groups.file_ends[self.names.index(key) :][:2].tolist())
        stem, _, row = key.rpartition("/")
        name = stem if stem in self.names else f"{stem}{self.groups.suffix}"
        if name not in self.names:
            return []
        start, stop = self.groups.file_ends[self.names.index(name) :][:2].tolist()
        return [start + number for number in numbers_in(row) if start + number < stop]

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        low, high = self.edges()
        ranges = {}
        bounds = zip(self.groups.file_ends[:-1], self.groups.file_ends[1:], strict=True)
        for footer, (begin, end) in zip(self.groups.footers, bounds, strict=True):
            start, stop = max(low, int(begin)), min(high, int(end))
            if start < stop:
                ranges[footer.name] = (start - int(begin), stop - int(begin))
        return ("rows", self.groups.folder), ranges

    @cached_property
    def class_names(self) -> dict[str, list[str]]:
        """The names of classes by column, if Hugging Face `datasets` has recorded them."""
        return class_names(self.groups.schema.metadata or {})

    @cached_property
    def all_parts(self) -> list[str]:
        columns = filter(is_data, self.groups.columns)
        names = list(dict.fromkeys((*columns, *self.groups.partitions)))
        named = [f"{column}_name" for column in self.class_names if column in names]
        return [*names, *(name for name in named if name not in names)]

    def _columns_to_read(self) -> tuple[str, ...]:
        """Return the columns that the chosen parts are taken from."""
        columns, chosen = self.groups.columns, self.chosen_parts
        if chosen is None:
            names = list(filter(is_data, columns))
        else:
            named = {name.removesuffix("_name") for name in chosen - set(columns)}
            names = [name for name in columns if name in chosen | named]
        self.groups.check_columns(names)
        return tuple(names)

    def _values(
        self, table: RowTable, rows: Ints
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[int, tuple[str, str]]]:
        """Return the values of some rows of a row group by column, and the paths of files.

        The last dict tells of rows that cannot be read, by index, in which column and why.
        """
        values, paths = {}, {}
        failures: dict[int, tuple[str, str]] = {}
        for name in self.columns:
            own, own_paths, own_failures = table.values(name, rows)
            failures |= {at: (name, problem) for at, problem in own_failures.items()}
            if own_paths is not None:
                paths[name] = own_paths
            if self.takes(name):
                values[name] = own
            called = f"{name}_name"
            is_named = name in self.class_names and called not in self.groups.columns
            if is_named and self.takes(called):
                values[called] = [class_name(self.class_names[name], each) for each in own]
        return values, paths, failures

    def _why_empty(self) -> str:
        rows = counted(int(self.groups.ends[-1]), "row")
        files = counted(len(self.names), "file")
        has = f"split {self.split_part!r} has {self.last - self.first} of {rows} in {files}"
        return f"{has}{self._left_none()}"

    def _groups_of(self, rows: Ints) -> Ints:
        return np.asarray(np.searchsorted(self.groups.ends, rows, side="right") - 1)


@dataclass(frozen=True)
class _TableBlock(Block):
    """Rows as samples, whose bytes are views of row groups until they are taken.

    Args:
        built: The samples; None where they were taken, so that the row group goes with the last.
        paths: The paths of the files that each holds, by column; None for one without bytes.
    """

    built: list[Any]
    paths: list[Mapping[str, Any] | None]

    def samples(self, start: int, stop: int) -> list[CrudeSample]:
        return [
            sample if files is None else _made(sample, files)
            for sample, files in zip(
                release(self.built, start, stop), self.paths[start:stop], strict=True
            )
        ]

    def with_sources(self, dataset_path: str) -> _TableBlock:
        record_sources(dataset_path, self.built)
        return self


@dataclass(frozen=True)
class _UnreadBlock(Block):
    """Rows with so large values that each is read when it is taken.

    Args:
        source: Where they are read.
        numbers: Their numbers in the whole dataset.
        keys: Their restore keys.
        subflavors: The `__subflavors__` of all.
        dataset_path: What their `__sources__` name; None to record none.
    """

    source: RowSource
    numbers: Ints
    keys: RestoreKeys
    subflavors: Mapping[str, Any] | None
    dataset_path: str | None = None

    def samples(self, start: int, stop: int) -> list[CrudeSample]:
        return [self._sample(at) for at in range(start, stop)]

    def with_sources(self, dataset_path: str) -> _UnreadBlock:
        return replace(self, dataset_path=dataset_path)

    def _sample(self, at: int) -> CrudeSample:
        one = slice(at, at + 1)
        block = self.source.read_numbers(self.numbers[one], self.keys[one], self.subflavors)
        if self.dataset_path is not None:
            block = block.with_sources(self.dataset_path)
        sample: CrudeSample = block.samples(0, 1)[0]
        return sample


def _unreadable(sample: CrudeSample, problem: str) -> UnreadableSample:
    entries = {name: value for name, value in sample.items() if name in META_NAMES}
    return UnreadableSample(entries, DecodeError(problem))


def _holds_bytes(values: list[Any]) -> bool:
    return not {bytes, memoryview}.isdisjoint(map(type, values))


def _by_row(columns: Mapping[str, list[Any]], count: int) -> Iterator[tuple[Any, ...]]:
    """Return the values of some columns, row by row."""
    return zip(*columns.values(), strict=True) if columns else repeat((), count)


def _made(sample: CrudeSample, paths: Mapping[str, Any]) -> CrudeSample:
    """Return a sample with copied bytes, and record which files they are."""
    files: dict[str, Any] = {
        name: _file_of(name, sample[name], paths.get(name)) for name in _copy_bytes(sample)
    }
    for name, path in paths.items():
        content = sample.get(name)
        if type(content) is list:
            pairs = zip(content, path, strict=True)
            files[name] = [one and _file_of(name, one, own) for one, own in pairs]
        elif content is None and path and name in sample:
            _warn_of_missing_bytes(sample, name, path)
    if named := {name: file for name, file in files.items() if file is not None}:
        sample[PART_FILES] = named
    return sample


def _warn_of_missing_bytes(sample: CrudeSample, name: str, path: str) -> None:
    shard = sample["__shard__"]
    warn_once(
        logger,
        f"{shard} {name}",
        "%s: column %r has the path of a file, such as %r in sample %r, but not its bytes; the "
        "part is None. Write the table again with the files embedded, as `datasets` does in "
        "`push_to_hub`",
        *(shard, name, path, sample["__key__"]),
    )


def _copy_bytes(sample: CrudeSample) -> list[str]:
    """Copy the views in a sample to bytes, and return the names of these parts."""
    names = []
    for name, value in sample.items():
        if type(value) is memoryview:
            sample[name] = bytes(value)
            names.append(name)
        elif type(value) is bytes:
            names.append(name)
    return names


def _file_of(name: str, content: bytes, path: str | None) -> str | None:
    """Return the file name of a part whose name does not tell it."""
    suffix = _decoded_suffix(path[path.rfind(".") :]) if path else None
    return f"{name}{suffix}" if suffix else file_of_part(name, content)


@lru_cache(maxsize=256)
def _decoded_suffix(suffix: str) -> str | None:
    return suffix.lower() if is_decoded(f"x{suffix}") else None
