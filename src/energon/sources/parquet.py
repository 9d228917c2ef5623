"""Read the rows of Parquet files as samples, a row group at a time."""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from energon.decode.sample_decoder import is_decoded
from energon.errors import ConfigError, EmptyDatasetError, FormatError
from energon.extra import needs_extra
from energon.formats.meta.info import META
from energon.formats.meta.split import find_split
from energon.formats.meta.split_names import (
    parse_shares,
    ratio_names,
    ratio_range,
    splits_by_name,
)
from energon.formats.parquet import ParquetFooter, parse_footer
from energon.formats.signature import guess_extension
from energon.io.address import is_remote, join_address, redact
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.files import file_info
from energon.io.local import OpenFile
from energon.io.range_file import RangeFile, RemoteFile
from energon.limits import DECODED_BYTES
from energon.metadataset.dataset_config import DatasetConfig, load_dataset_config
from energon.metadataset.leaf import Leaf
from energon.plan.subset import include_ordinals, resolve_range
from energon.samples.crude import PART_FILES, CrudeSample, find_part
from energon.samples.field_map import FieldMap
from energon.sources.extents import Extents
from energon.sources.fingerprint import content_fingerprint
from energon.sources.kinds import DatasetKind, Location, Source
from energon.sources.parquet_files import SUFFIX, ParquetFiles, is_pattern, partitions
from energon.sources.part_filter import PartFilter
from energon.sources.shards import ShardPool
from energon.sources.webdataset import included

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

Ints = NDArray[np.int64]

HELD_BYTES = 512 << 20
"""Decoded row groups that a source keeps: those of the slices that are open."""
MAX_SLICES = 16
OPEN_FILES = 64


@dataclass(frozen=True)
class ParquetOptions:
    """What a document says under `read` of Parquet files.

    Args:
        columns: The columns to read; None for those that the field map names, or else all.
        sample_type: The sample type that rows become, like "CaptioningSample"; None leaves them
            to cookers.
        field_map: For each field of it, the column that it is taken from.
        split: The shares of train, val and test in the rows, like "99,1,0"; None if the names of
            the files say which split they are in, or else all are "train".
        origin: Where they were written.

    Raises:
        ConfigError: If they make no sense.
    """

    columns: Sequence[str] | None = None
    sample_type: str | None = None
    field_map: Mapping[str, str] | None = None
    split: str | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if problem := next(self._problems(), None):
            raise ConfigError(f"{self.origin}: read: {problem}")

    def _problems(self) -> Iterator[str]:
        columns = self.columns
        if columns is not None and (
            not isinstance(columns, list | tuple)
            or not columns
            or not all(isinstance(name, str) for name in columns)
        ):
            yield f"columns is {columns!r}; expected a list of names"
        if (self.sample_type is None) != (self.field_map is None):
            yield "sample_type and field_map belong together, one is missing"
        if self.sample_type is not None and not isinstance(self.sample_type, str):
            yield f"sample_type is {self.sample_type!r}; expected a name like CaptioningSample"
        if self.field_map is not None and not isinstance(self.field_map, Mapping):
            yield f"field_map is {self.field_map!r}; expected a column for each field"
        if self.columns is not None and self.field_map is not None:
            yield "field_map says which columns to read; drop columns"
        if self.split is not None:
            parse_shares(self.split, origin=self.origin)


class RowGroups:
    """The row groups of some files, numbered through.

    Args:
        files: The files of a dataset.
        footers: Those that are read, with what stands at their ends.
    """

    def __init__(self, files: ParquetFiles, footers: Sequence[ParquetFooter]) -> None:
        self.files = files
        self.footers = list(footers)
        counts = [len(footer.rows) for footer in footers]
        self.file = np.repeat(np.arange(len(counts)), counts)
        self.first = np.array([0, *accumulate(counts)])
        rows = np.array([n for footer in footers for n in footer.rows], np.int64)
        self.ends = np.concatenate(([0], np.cumsum(rows)))
        """Where each begins among all rows, and the end."""
        sizes = [sum(footer.rows) for footer in footers]
        self.file_ends = np.array([0, *accumulate(sizes)])
        self._metadata: OrderedDict[int, FileMetaData] = OrderedDict()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._tables: OrderedDict[tuple[int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._range_files: dict[int, RangeFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (self.files, self.footers)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self.ends[-1])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.schema_of(0)

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""
        return self.metadata(number).schema.to_arrow_schema()

    def metadata(self, number: int) -> FileMetaData:
        """Return what a file says of itself."""
        found = self._metadata.get(number)
        if found is None:
            footer = self.footers[number].footer
            found = self._metadata[number] = parse_footer(footer, origin=self.origin(number))
            if len(self._metadata) > OPEN_FILES:
                self._metadata.popitem(last=False)
        return found

    def origin(self, number: int) -> str:
        """Return what messages call a file."""
        return redact(self.files.path(self.footers[number].name))

    def table(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        """Return some columns of a row group; the same again for as long as there is memory.

        Raises:
            FormatError: If it is damaged.
        """
        found = self._tables.get((group, columns))
        if found is None:
            found = self._tables[group, columns] = self._decode(group, columns)
            held = sum(table.nbytes for table in list(self._tables.values()))
            while held > HELD_BYTES and len(self._tables) > 2:
                held -= self._tables.popitem(last=False)[1].nbytes
        else:
            self._tables.move_to_end((group, columns))
        return found

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where the contents of some columns of a row group begin and end in the file."""
        number = int(self.file[group])
        metadata = self.metadata(number).row_group(group - int(self.first[number]))
        found = []
        for at in range(metadata.num_columns):
            chunk = metadata.column(at)
            if chunk.path_in_schema.split(".")[0] in columns or chunk.path_in_schema in columns:
                starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
                start = min(each for each in starts if each)
                found.append((start, start + chunk.total_compressed_size))
        size = self.footers[number].size
        if any(not 4 <= start <= stop <= size for start, stop in found):
            raise FormatError(
                f"{self.origin(number)}: a column lies outside of the file; it is damaged"
            )
        return sorted(found)

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""
        found = self._range_files.get(number)
        if found is None:
            address = self.files.path(self.footers[number].name)
            found = RemoteFile(address) if is_remote(address) else OpenFile(address)
            self._range_files[number] = found
            if len(self._range_files) > OPEN_FILES:
                del self._range_files[next(iter(self._range_files))]
        return found

    def _decode(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        with needs_extra("parquet", "Parquet files need pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        number = int(self.file[group])
        own = group - int(self.first[number])
        metadata = self.metadata(number)
        size = metadata.row_group(own).total_byte_size
        if size > DECODED_BYTES.value:
            raise FormatError(
                f"{self.origin(number)}: row group {own} has {size} bytes, more than "
                f"{DECODED_BYTES.value}; {DECODED_BYTES.hint}"
            )
        size = self.footers[number].size
        source = _Chunks(self.range_file(number), size, self.chunks(group, columns))
        try:
            reader = pq.ParquetFile(pa.PythonFile(source, "r"), metadata=metadata)
            table = reader.read_row_group(own, columns=list(columns), use_threads=False)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise FormatError(
                f"{self.origin(number)}: row group {own} cannot be read: {error}; the file is "
                "damaged or changed, restore it or run `energon prepare` again"
            ) from error
        if table.num_rows != self.footers[number].rows[own]:
            raise FormatError(
                f"{self.origin(number)}: row group {own} has {table.num_rows} rows, not "
                f"{self.footers[number].rows[own]}"
            )
        return table


class _Chunks(io.RawIOBase):
    """A file of which some ranges are read at once, and the rest when it is asked for."""

    def __init__(self, file: RangeFile, size: int, ranges: Sequence[tuple[int, int]]) -> None:
        starts = [start for start, _ in ranges]
        self._chunks = dict(
            zip(starts, file.pread_many(starts, [b - a for a, b in ranges]), strict=True)
        )
        self._file = file
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        self._at = stop
        for low, content in self._chunks.items():
            if low <= start and stop <= low + len(content):
                return content[start - low : stop - low]
        return self._file.pread(start, max(0, stop - start))


class ParquetSource:
    """The rows of a split of Parquet files, numbered from 0.

    A sample has a part for each column, and for each `key=value` in the path of its file. Its key
    is the name of the file without its suffix, a slash, and the number of the row in the file.

    Args:
        address: See `ParquetFiles`.
        split_part: Which split.
        options: Which columns are read, and which splits there are.
        parts: The columns to read, if `options` say none; None for all.
        subsets: Ranges to narrow the split to, see `energon.plan.subset`.
        exclude: Keys that are left out, or names of files.

    Raises:
        DatasetNotFoundError: If there are no files.
        FormatError: If one of them is no Parquet file, or has other columns than the first.
        ConfigError: If there is no such split or column.
        EmptyDatasetError: If no sample is left.
        MissingExtraError: If pyarrow is not installed.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: ParquetOptions | None = None,
        parts: Collection[str] | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.path = any_path(address)
        self.split_part = split_part
        self.options = options or ParquetOptions(origin=str(self.path))
        files = ParquetFiles(os.fspath(address))
        chosen, ratio = _split_files(files, self.options, split_part)
        footers = {footer.name: footer for footer in files.footers()}
        self.groups = RowGroups(files, [footers[name] for name in chosen])
        total = self.groups.num_rows
        self.first, self.last = 0, total
        if ratio:
            origin = self.options.origin or str(self.path)
            self.first, self.last = ratio_range(
                self.options.split, split_part, total, what="rows", origin=origin
            )
        self.excluded = self._excluded(exclude)
        self.start, self.stop = resolve_range(self.last - self.first - len(self.excluded), subsets)
        if self.start >= self.stop:
            raise EmptyDatasetError(
                f"{self.path}: split {split_part!r} has {self.last - self.first} of {total} rows "
                f"in {len(chosen)} files, of which none is left"
            )
        self.partitions = _partition_values([partitions(name) for name in chosen])
        wanted = self.options.columns or (None if parts is None else sorted(parts))
        self.columns, self.wanted = self._columns(wanted)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def paths(self) -> list[AnyPath]:
        """Where the files are, in a list of one."""
        return [self.path]

    @property
    def is_remote(self) -> bool:
        """Whether the files are in an object store."""
        return isinstance(self.path, EPath)

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Bytes of a row in the columns that are read, on average over the first row group."""
        groups = np.flatnonzero(np.diff(self.groups.ends))[:1]
        size = sum(b - a for a, b in self.groups.chunks(int(groups[0]), self.columns))
        return size / float(np.diff(self.groups.ends)[groups[0]])

    @cached_property
    def preferred_slices(self) -> tuple[int, int]:
        """Rows that are best read together, and how many such slices may be open at a time.

        A row group is decoded as a whole, so a slice is as long as one, and as many are open as
        there is memory for.
        """
        rows = int(np.median(np.diff(self.groups.ends)))
        number = int(np.argmax(np.diff(self.groups.ends)))
        file = int(self.groups.file[number])
        group = self.groups.metadata(file).row_group(number - int(self.groups.first[file]))
        # A slice that is not laid out with row groups lies in two of them.
        most = HELD_BYTES // max(1, 2 * group.total_byte_size)
        return max(1, rows), max(1, min(MAX_SLICES, most))

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
            stem, base = name.removesuffix(SUFFIX), int(self.groups.file_ends[number])
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
            key=f"{name.removesuffix(SUFFIX)}/{own}",
            shard=name,
            sample=own,
            offset=chunks[0][0] if chunks else 0,
            parts=tuple(self.part_names),
        )

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        return [(self, ordinal)]

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
        return ("rows", self.groups.files.folder), found

    @property
    def part_names(self) -> list[str]:
        """The names of the parts that samples have."""
        return [name for name in self._all_parts if self._takes(name)]

    @cached_property
    def class_names(self) -> dict[str, list[str]]:
        """The names of classes by column, where Hugging Face `datasets` has noted them."""
        return _class_names(self.groups.schema.metadata or {})

    @cached_property
    def _all_parts(self) -> list[str]:
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
            given = {part for part in (find_part(self._all_parts, name) for name in wanted) if part}
            if self.options.columns is not None and len(given) < len(set(wanted)):
                missing = next(n for n in wanted if find_part(self._all_parts, n) is None)
                raise ConfigError(
                    f"{self.path}: there is no column {missing!r}, only "
                    f"{', '.join(self._all_parts)}"
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
        values = _Values()
        for name in self.columns:
            column = table.column(name).take(pa.array(rows))
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
        name = stem if stem in names else f"{stem}{SUFFIX}"
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


def _split_files(
    files: ParquetFiles, options: ParquetOptions, split_part: str
) -> tuple[list[str], bool]:
    """Return the files that a split is in, and whether a ratio says which of their rows."""
    names = [found.key for found in files.found]
    if options.split is not None:
        return names, True
    splits = splits_by_name(names, by_file=True)
    if "" in splits:
        return names, True
    found = find_split(split_part, splits)
    if found is None:
        raise ConfigError(
            f"{redact(files.address)}: there is no split {split_part!r}, only {', '.join(splits)}, "
            "by the names of its files"
        )
    return splits[found], False


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


class ParquetKind(DatasetKind):
    """Parquet files, whose rows are samples."""

    name = "parquet"
    noun = "a set of Parquet files"
    options = tuple(field.name for field in fields(ParquetOptions) if field.name != "origin")
    prepares = True

    def prepare(self, address: str) -> int:
        return sum(sum(footer.rows) for footer in ParquetFiles(address).prepare())

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        names = [found.key for found in ParquetFiles(address).found]
        splits = list(splits_by_name(names, by_file=True))
        return ratio_names(None, origin=address) if splits == [""] else splits

    def config(self, leaf: Leaf) -> DatasetConfig:
        options = ParquetOptions(**leaf.read, origin=leaf.origin)
        if options.sample_type is not None:
            return DatasetConfig(
                crude=False,
                sample_type=("energon", options.sample_type),
                field_map=options.field_map,
                origin=leaf.path,
            )
        described = join_address(leaf.path, f"{META}/{leaf.dataset_config}")
        if not is_pattern(leaf.path) and not leaf.path.endswith(SUFFIX) and file_info(described):
            return load_dataset_config(leaf.path, leaf.dataset_config)
        return DatasetConfig(origin=leaf.path)

    def open(
        self,
        leaf: Leaf,
        config: DatasetConfig,
        *,
        exclude: Sequence[str] = (),
        parts: Collection[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> ParquetSource:
        source = ParquetSource(
            leaf.path,
            split_part=leaf.split_part,
            options=ParquetOptions(**leaf.read, origin=leaf.origin),
            parts=None if isinstance(parts, PartFilter) else parts,
            subsets=leaf.subsets,
            exclude=exclude,
        )
        if isinstance(parts, PartFilter):
            chosen = [name for name in source.part_names if name in parts]
            source.columns, source.wanted = source._columns(chosen)
        return source

    def check_field_map(self, source: Any, field_map: FieldMap) -> None:
        field_map.check_parts(source._all_parts, origin=str(source.path))

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        files = ParquetFiles(address)
        groups = RowGroups(files, files.footers())
        splits = {}
        for name in self.split_names(address):
            chosen, _ = _split_files(files, ParquetOptions(), name)
            rows = [sum(f.rows) for f in groups.footers if f.name in chosen]
            splits[name] = {"samples": sum(rows), "shards": len(rows), "excluded": 0}
        return {
            "sample_type": "CrudeSample",
            "samples": groups.num_rows,
            "shards": len(groups.footers),
            "bytes": sum(footer.size for footer in groups.footers),
            "missing_shards": [],
            "energon_version": None,
            "splits": splits,
            "columns": {field.name: str(field.type) for field in groups.schema},
            "row_groups": len(groups.file),
        }


KIND = ParquetKind()
