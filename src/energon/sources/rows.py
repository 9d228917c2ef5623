"""Rows of tables as samples, whatever files they are in."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

import numpy as np

from energon.arrays import Ints
from energon.decode.sample_decoder import is_decoded
from energon.errors import ConfigError, EmptyDatasetError, FormatError
from energon.formats.media import guess_extension
from energon.formats.meta.split import ratio_range
from energon.formats.parquet import ParquetFooter
from energon.io.epath import AnyPath
from energon.io.range_file import RangeFile
from energon.plan.subset import include_ordinals, resolve_range
from energon.samples.crude import PART_FILES, CrudeSample, find_part
from energon.sources.extents import Extents, PartFilter
from energon.sources.kinds import Location, SingleSource, content_fingerprint
from energon.sources.row_kind import RowOptions
from energon.sources.webdataset import included

if TYPE_CHECKING:
    import pyarrow as pa


class RowGroups(Protocol):
    """Rows of files, in groups that are read as a whole, numbered through."""

    @property
    def folder(self) -> str:
        """The folder that the files are in."""

    @property
    def suffix(self) -> str:
        """What the names of files end with."""

    @property
    def footers(self) -> list[ParquetFooter]:
        """The files, with the rows of each of their groups."""

    @property
    def file(self) -> Ints:
        """The file of each group."""

    @property
    def ends(self) -> Ints:
        """Where each group begins among all rows, and the end."""

    @property
    def file_ends(self) -> Ints:
        """The same of files."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""

    def origin(self, number: int) -> str:
        """Return what messages call a file."""

    def table(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """Return some columns of a group."""

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where some columns of a group begin and end in the file."""

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""


class RowSource(SingleSource):
    """The rows of a split of some files, numbered from 0.

    A sample has a part for each column, and for each `key=value` in the path of its file. Its key
    is the name of the file without its suffix, a slash, and the number of the row in the file.

    Args:
        path: Where the dataset is.
        groups: The rows of the files that the split is in.
        split_part: Which split.
        by_ratio: Whether a ratio says which of the rows belong to it, or else all do.
        options: Which columns are read, and which splits there are.
        parts: The columns to read, if `options` say none; None for all.
        subsets: Ranges to narrow the split to, see `energon.plan.subset`.
        exclude: Keys that are left out, or names of files.

    Raises:
        FormatError: If a file has other columns than the first.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: AnyPath,
        groups: RowGroups,
        *,
        split_part: str,
        by_ratio: bool,
        options: RowOptions,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.groups = groups
        self.split_part = split_part
        self.options = options
        names = [footer.name for footer in groups.footers]
        total = int(groups.ends[-1])
        self.first, self.last = 0, total
        if by_ratio:
            origin = options.origin or str(path)
            self.first, self.last = ratio_range(
                options.split, split_part, total, what="rows", origin=origin
            )
        self.excluded = self._excluded(exclude)
        self.start, self.stop = resolve_range(self.last - self.first - len(self.excluded), subsets)
        if self.start >= self.stop:
            raise EmptyDatasetError(
                f"{path}: split {split_part!r} has {self.last - self.first} of {total} rows "
                f"in {len(names)} files, of which none is left"
            )
        self.partitions = _partition_values([partitions(name) for name in names])
        wanted = options.columns
        if isinstance(parts, PartFilter):
            wanted = [name for name in self.all_parts if name in parts]
        elif wanted is None and parts is not None:
            wanted = sorted(parts)
        self.columns, self.wanted = self._columns(wanted)

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Bytes of a row in the columns that are read, on average over the first group."""
        groups = np.flatnonzero(np.diff(self.groups.ends))[:1]
        size = sum(b - a for a, b in self.groups.chunks(int(groups[0]), self.columns))
        return size / float(np.diff(self.groups.ends)[groups[0]])

    def fingerprint(self) -> dict[str, Any]:
        """Return what a saved state must find unchanged: the samples and their order."""
        content = {
            "files": [[each.name, each.size, list(each.rows)] for each in self.groups.footers],
            "excluded": self.excluded.tolist(),
            "range": [self.first, self.last, self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> list[CrudeSample]:
        """Return samples, in the order of `ordinals`; see `Source.read`."""
        rows = self._rows(ordinals)
        groups = self._groups_of(rows)
        keys = [(n,) for n in ordinals.tolist()] if restore_keys is None else restore_keys
        samples: list[Any] = [None] * len(rows)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            number = int(self.groups.file[group])
            name = self.groups.footers[number].name
            stem, base = name.removesuffix(self.groups.suffix), int(self.groups.file_ends[number])
            values = self._values(group, rows[places] - self.groups.ends[group])
            given = {key: own[number] for key, own in self.partitions.items() if self._takes(key)}
            for at, place in enumerate(places.tolist()):
                sample = CrudeSample(
                    {
                        "__key__": f"{stem}/{rows[place] - base}",
                        "__shard__": name,
                        "__restore_key__": keys[place],
                        "__subflavors__": subflavors,
                    }
                )
                for column, own in values.items():
                    sample[column] = own[at]
                sample.update(given)
                files = self._part_files(sample, {c: p[at] for c, p in values.paths.items()})
                if files:
                    sample[PART_FILES] = files
                samples[place] = sample
        return samples

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the row groups of samples lie, as far as their columns are read."""
        rows = self._rows(ordinals)
        groups = self._groups_of(rows)
        low, high = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for group in np.unique(groups).tolist():
            chunks = self.groups.chunks(group, self.columns)
            if not chunks:
                continue
            needed = sum(stop - start for start, stop in chunks)
            if chunks[-1][1] - chunks[0][0] > 2 * needed:
                chunks = [max(chunks, key=lambda each: each[1] - each[0])]
            low[groups == group], high[groups == group] = chunks[0][0], chunks[-1][1]
        number = self.groups.file[groups]
        for each in np.unique(number).tolist():
            inside = np.flatnonzero((number == each) & (high > low))
            order = inside[np.argsort(low[inside], kind="stable")]
            yield Extents(self.groups.range_file(each), order, low[order], high[order])

    def locate(self, ordinal: int) -> Location:
        """Return where a sample lies; the offset is that of its row group."""
        row = int(self._rows(np.array([ordinal]))[0])
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

    def find(self, key: str) -> list[int]:
        row = self._row_of(key)
        return [] if row is None else included(self, row - self.first)

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        edges = np.array([self.start, self.stop - 1])
        low, high = (include_ordinals(edges, self.excluded) + self.first).tolist()
        found = {}
        bounds = zip(self.groups.file_ends[:-1], self.groups.file_ends[1:], strict=True)
        for footer, (begin, end) in zip(self.groups.footers, bounds, strict=True):
            start, stop = max(low, int(begin)), min(high + 1, int(end))
            if start < stop:
                found[footer.name] = (start - int(begin), stop - int(begin))
        return ("rows", self.groups.folder), found

    @property
    def part_names(self) -> list[str]:
        """The names of the parts that samples have."""
        return [name for name in self.all_parts if self._takes(name)]

    @cached_property
    def class_names(self) -> dict[str, list[str]]:
        """The names of classes by column, where Hugging Face `datasets` has noted them."""
        return _class_names(self.groups.schema.metadata or {})

    @cached_property
    def all_parts(self) -> list[str]:
        columns = [name for name in self.groups.schema.names if not name.startswith("__")]
        names = list(dict.fromkeys((*columns, *self.partitions)))
        named = [f"{column}_name" for column in self.class_names if column in names]
        return [*names, *(name for name in named if name not in names)]

    def _takes(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted

    def _columns(self, wanted: Sequence[str] | None) -> tuple[tuple[str, ...], set[str] | None]:
        """Return the columns to read, and the parts to give; None for all."""
        schema = self.groups.schema
        if wanted is None:
            given = None
            # Names like __index_level_0__ are those of no data.
            names = [name for name in schema.names if not name.startswith("__")]
        else:
            given = {part for part in (find_part(self.all_parts, name) for name in wanted) if part}
            if self.options.columns is not None and len(given) < len(set(wanted)):
                missing = next(n for n in wanted if find_part(self.all_parts, n) is None)
                raise ConfigError(
                    f"{self.path}: there is no column {missing!r}, only {', '.join(self.all_parts)}"
                )
            named = {name.removesuffix("_name") for name in given - set(schema.names)}
            names = [name for name in schema.names if name in given | named]
        doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if doubled:
            raise FormatError(f"{self.groups.origin(0)}: has two columns {doubled[0]!r}")
        self._check_schemas(names)
        return tuple(names), given

    def _check_schemas(self, names: Sequence[str]) -> None:
        """Make sure that all files have the same columns, as far as they are read."""
        first = {name: _plain_type(self.groups.schema.field(name).type) for name in names}
        for number in range(1, len(self.groups.footers)):
            schema = self.groups.schema_of(number)
            for name, kind in first.items():
                at = schema.get_field_index(name)
                found = None if at < 0 else _plain_type(schema.field(at).type)
                if found != kind:
                    problem = "has no column" if found is None else f"has {found} in column"
                    raise FormatError(
                        f"{self.groups.origin(number)}: {problem} {name!r}, but "
                        f"{self.groups.origin(0)} has {kind} there; train on files of one schema"
                    )

    def _values(self, group: int, rows: Ints) -> _Values:
        """Return what some rows of a row group have in each column."""
        import pyarrow as pa

        table = self.groups.table(group, self.columns)
        # To make an array of numbers in the usual way imports pandas, which takes a second.
        buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
        wanted = pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])
        values = _Values()
        for name in self.columns:
            column = table.column(name).take(wanted)
            own = column.to_pylist()
            if _is_file(column.type):
                values.paths[name] = [each and each["path"] for each in own]
                own = [each and each["bytes"] for each in own]
            elif _is_list_of_files(column.type):
                own = [each and [one and one["bytes"] for one in each] for each in own]
            if self._takes(name):
                values[name] = own
            called = f"{name}_name"
            is_named = name in self.class_names and called not in self.groups.schema.names
            if is_named and self._takes(called):
                values[called] = [_name_of(self.class_names[name], each) for each in own]
        return values

    def _part_files(self, sample: CrudeSample, paths: Mapping[str, Any]) -> dict[str, str]:
        """Return what files the bytes of columns are, whose names do not say it."""
        found = {}
        for name, value in sample.items():
            if isinstance(value, bytes) and not name.startswith("__"):
                suffix = os.path.splitext(str(paths.get(name) or ""))[1].lower()
                if suffix and is_decoded(f"x{suffix}"):
                    found[name] = f"{name}{suffix}"
                elif not is_decoded(name) and (extension := guess_extension(value)):
                    found[name] = f"{name}.{extension}"
        return found

    def _rows(self, ordinals: Ints) -> Ints:
        """Return the rows in all files of samples of the split."""
        outside = ordinals[(ordinals < 0) | (ordinals >= len(self))]
        if len(outside):
            raise IndexError(
                f"{self.path}: split {self.split_part!r} has samples 0 to {len(self) - 1}, not "
                f"{outside[0]}"
            )
        inside = ordinals + self.start
        if len(self.excluded):
            inside = include_ordinals(inside, self.excluded)
        return np.asarray(inside + self.first)

    def _groups_of(self, rows: Ints) -> Ints:
        return np.asarray(np.searchsorted(self.groups.ends, rows, side="right") - 1)

    def _row_of(self, key: str) -> int | None:
        """Return the row of a key among those of all files; None if there is none."""
        stem, _, row = key.rpartition("/")
        names = [footer.name for footer in self.groups.footers]
        name = stem if stem in names else f"{stem}{self.groups.suffix}"
        if name not in names or not row.isdecimal():
            return None
        number = names.index(name)
        found = int(self.groups.file_ends[number]) + int(row)
        return found if found < self.groups.file_ends[number + 1] else None

    def _excluded(self, keys: Sequence[str]) -> Ints:
        """Return the places of excluded keys in the split, ascending."""
        names = [footer.name for footer in self.groups.footers]
        rows: set[int] = set()
        for key in keys:
            if key in names:
                number = names.index(key)
                rows.update(range(*self.groups.file_ends[number : number + 2].tolist()))
            elif (row := self._row_of(key)) is not None:
                rows.add(row)
        inside = {row - self.first for row in rows if self.first <= row < self.last}
        return np.array(sorted(inside), np.int64)


class _Values(dict[str, list[Any]]):
    """Values by column, and the paths of files that columns hold."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, list[Any]] = {}


def partitions(name: str) -> dict[str, str | None]:
    """Return the values that the folders of a file name stand for, as in `year=2024/lang=en/`.

    Example:
        >>> partitions("year=2024/lang=en/0.parquet")
        {'year': '2024', 'lang': 'en'}
    """
    steps = [step.partition("=") for step in name.split("/")[:-1] if "=" in step]
    return {
        unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for key, _, value in steps
    }


def _partition_values(files: Sequence[Mapping[str, str | None]]) -> dict[str, list[Any]]:
    """Return the values of all files by key, as whole numbers if they all are."""
    found: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for file in files for key in file):
        values = [file.get(key) for file in files]
        whole = all(value is None or (value.isascii() and value.isdecimal()) for value in values)
        found[key] = [int(v) if v is not None and whole else v for v in values]
    return found


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            str(column): [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _name_of(names: Sequence[str], label: Any) -> str | None:
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values, however they are stored."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return small.get(kind, kind)


def _is_file(kind: pa.DataType) -> bool:
    """Return whether a column holds files as Hugging Face `datasets` writes them."""
    import pyarrow as pa

    return pa.types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}


def _is_list_of_files(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and _is_file(kind.value_type)
