"""Values of Arrow columns as the parts of samples, and rows in groups that are read as a whole."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from energon.arrays import Ints
from energon.errors import FormatError
from energon.formats.parquet import (
    ROW_BATCH_BYTES,
    ParquetFooter,
    has_references,
    is_json,
    value_bytes,
)
from energon.formats.text import parse_json
from energon.io.range_file import RangeFile
from energon.messages import describe_error

if TYPE_CHECKING:
    import pyarrow as pa

FEW_ROWS = 16
"""Rows of a group up to which values are taken one by one, without making an array first."""
SHORT_TABLE_ROWS = 256
_FILE_FIELDS = frozenset({"bytes", "path"})


class Values(NamedTuple):
    """The values of some rows of a column.

    Args:
        values: The values. Bytes are views, which are not copied: later code makes bytes of them
            if necessary.
        paths: The paths of files, if the values are files.
        failures: Why values cannot be read, by their indices in `values`, where they are None.
    """

    values: list[Any]
    paths: list[Any] | None
    failures: Mapping[int, str]

    def pick(self, indices: Sequence[int]) -> Values:
        """Return the values at some indices."""
        failures = self.failures
        return Values(
            [self.values[n] for n in indices],
            self.paths and [self.paths[n] for n in indices],
            failures and {at: failures[n] for at, n in enumerate(indices) if n in failures},
        )


class RowTable:
    """A table from which the values of a few rows at a time are taken.

    Args:
        table: The table.
        columns: The types of the columns of the dataset. The values of a table of other types are
            converted; those of a column that it lacks are None.
        is_kept: Whether it is the same object until all rows have been taken. The columns of a
            short table are then converted as a whole, which costs no more than for a few rows.
    """

    def __init__(
        self, table: pa.Table, columns: Mapping[str, pa.DataType], *, is_kept: bool = False
    ) -> None:
        self.table = table
        self.num_bytes = table.nbytes
        self._columns = columns
        self._is_kept = (
            is_kept
            and table.num_rows <= SHORT_TABLE_ROWS
            and self.value_bytes(np.arange(table.num_rows)) <= ROW_BATCH_BYTES
        )
        self._values: dict[str, Values] = {}

    def value_bytes(self, rows: Ints) -> int:
        """Return roughly how many bytes the values of some rows have, if each is stored."""
        return sum(_value_bytes(column, rows) for column in self.table.columns)

    def values(self, name: str, rows: Ints) -> Values:
        """Return the values of some rows of a column."""
        column = self._values.get(name)
        if column is None:
            if not self._is_converted_whole(name):
                return self._read(name, rows)
            column = self._convert(name)
        return column.pick(rows.tolist())

    def convert(self) -> None:
        """Convert the columns that are converted as a whole now, for example in another thread."""
        for name in self.table.column_names:
            if self._is_converted_whole(name):
                self._convert(name)

    def _is_converted_whole(self, name: str) -> bool:
        return self._is_kept and not _is_nested(self._columns[name])

    def _convert(self, name: str) -> Values:
        column = self._values[name] = self._read(name, np.arange(self.table.num_rows))
        return column

    def _read(self, name: str, rows: Ints) -> Values:
        at = self.table.schema.get_field_index(name)
        if at < 0:
            return Values([None] * len(rows), None, {})
        column, kind = self.table.column(at), self._columns[name]
        if column.num_chunks == 1:
            return _read_values(column, kind, rows)
        return _read_chunks(column, kind, rows)


def _read_chunks(column: pa.ChunkedArray, kind: pa.DataType, rows: Ints) -> Values:
    """Return the values of some rows of a column of several chunks, from one after the other.

    Taken from all at once, they might have more bytes than an array has room for.
    """
    values: list[Any] = [None] * len(rows)
    paths: list[Any] = [None] * len(rows)
    failures: dict[int, str] = {}
    has_paths = False
    for chunk, requested, inside in _by_chunk(column, rows):
        own = _read_values(chunk, kind, inside)
        for index, at in enumerate(requested.tolist()):
            values[at] = own.values[index]
            if own.paths is not None:
                paths[at], has_paths = own.paths[index], True
            if index in own.failures:
                failures[at] = own.failures[index]
    return Values(values, paths if has_paths else None, failures)


def _by_chunk(column: pa.ChunkedArray, rows: Ints) -> Iterator[tuple[pa.ChunkedArray, Ints, Ints]]:
    """Yield the chunks that have any of the rows, the indices of these, and the rows there."""
    import pyarrow as pa

    start = 0
    for chunk in column.chunks:
        requested = np.flatnonzero((rows >= start) & (rows < start + len(chunk)))
        if len(requested):
            yield pa.chunked_array([chunk]), requested, rows[requested] - start
        start += len(chunk)


def _value_bytes(column: pa.ChunkedArray, rows: Ints) -> int:
    """Return roughly how many bytes some rows of a column have, if each is stored."""
    import pyarrow as pa

    if not has_references(column.type):
        return int(column.nbytes * len(rows) // max(1, len(column)))
    size = 0
    for chunk, _, inside in _by_chunk(column, rows):
        try:
            size += value_bytes(_taken(chunk, inside))
        except pa.ArrowNotImplementedError:  # of views and runs
            size += value_bytes(chunk) * len(inside) // len(chunk)
    return size


def _read_values(column: pa.ChunkedArray, kind: pa.DataType, rows: Ints) -> Values:
    """Return the values of some rows of a column, converted to a type."""
    try:
        return Values(*_values_and_paths(column, kind, rows), {})
    except MemoryError:
        raise
    except Exception as error:  # Python has no dates after 9999, and text may not be UTF-8
        if len(rows) == 1:
            return Values([None], None, {0: f"{column.type}: {describe_error(error)}"})
    single = [_read_values(column, kind, rows[at : at + 1]) for at in range(len(rows))]
    has_paths = any(each.paths is not None for each in single)
    return Values(
        [each.values[0] for each in single],
        [each.paths and each.paths[0] for each in single] if has_paths else None,
        {at: each.failures[0] for at, each in enumerate(single) if each.failures},
    )


def _values_and_paths(
    column: pa.ChunkedArray, kind: pa.DataType, rows: Ints
) -> tuple[list[Any], list[Any] | None]:
    if plain_type(column.type) != kind:
        import pyarrow.compute as pc

        # A whole number becomes the nearest float.
        options = pc.CastOptions(kind, allow_float_truncate=True)
        column, rows = _taken(column, rows).cast(options=options), np.arange(len(rows))
    if _is_list_of_files(column.type):
        return _lists_of_files(column, rows)
    if is_file_column(column.type):
        return _files(column, rows)
    values = _values(column, rows)
    return _parsed(values) if is_json(column.type) else values, None


def _values(column: pa.ChunkedArray, rows: Ints) -> list[Any]:
    """Return the values of some rows of a column, in the order of `rows`."""
    import pyarrow as pa

    if column.num_chunks == 1 and (
        pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    ):
        return _views(column.chunk(0), rows)
    return _python_values(column, rows)


def _files(column: pa.ChunkedArray, rows: Ints) -> tuple[list[Any], list[Any]]:
    """Return the bytes of some rows of a column of files, and their paths."""
    import pyarrow as pa

    if column.num_chunks != 1 or column.null_count:
        values = _python_values(column, rows)
        return [one and one["bytes"] for one in values], [one and one["path"] for one in values]
    [files] = column.chunks
    fields = [pa.chunked_array([files.field(name)]) for name in ("bytes", "path")]
    contents, paths = (_values(field, rows) for field in fields)
    return contents, paths


def _lists_of_files(column: pa.ChunkedArray, rows: Ints) -> tuple[list[Any], list[Any]]:
    """Return the bytes of some rows of a column of lists of files, and their paths."""
    values = _python_values(column, rows)
    contents, paths = (
        [each and [one and one[name] for one in each] for each in values]
        for name in ("bytes", "path")
    )
    return contents, paths


def is_file_column(kind: pa.DataType) -> bool:
    """Return whether a column holds files as Hugging Face `datasets` writes them."""
    import pyarrow as pa

    return pa.types.is_struct(kind) and {field.name for field in kind} == _FILE_FIELDS


def is_data(column: str) -> bool:
    """Return whether samples have a column; others, such as __index_level_0__, are of writers."""
    return not column.startswith("__")


def is_number(kind: pa.DataType) -> bool:
    """Return whether the values of a column are whole or floating-point numbers."""
    import pyarrow as pa

    plain = plain_type(kind)
    return bool(pa.types.is_integer(plain) or pa.types.is_floating(plain))


@lru_cache(maxsize=4096)
def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a column, however they are stored."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([(field.name, plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    return pa.binary() if types.is_large_binary(kind) or types.is_binary_view(kind) else kind


def common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type to which the values of two plain types can be converted; None if none fits.

    It is the one to which pyarrow promotes both if it is permissive.
    """
    import pyarrow as pa

    if first == second:
        return first
    schemas = [pa.schema([("", kind)]) for kind in (first, second)]
    try:
        return plain_type(pa.unify_schemas(schemas, promote_options="permissive").field(0).type)
    except pa.ArrowException:
        return None


def class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of classes by column, if Hugging Face `datasets` has recorded them."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            str(column): [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def class_name(names: Sequence[str], label: Any) -> str | None:
    """Return the name of a class; None for a number without one."""
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else None


def _python_values(column: pa.ChunkedArray, rows: Ints) -> list[Any]:
    if len(rows) <= FEW_ROWS:
        return [column[row].as_py() for row in rows.tolist()]
    return list(_taken(column, rows).to_pylist())


def _taken(column: pa.ChunkedArray, rows: Ints) -> pa.ChunkedArray:
    import pyarrow as pa

    # Making an array of numbers in the usual way imports pandas, which takes a second.
    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    return column.take(pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer]))


def _views(values: pa.Array, rows: Ints) -> list[memoryview | None]:
    import pyarrow as pa

    _, edges, content = values.buffers()
    kind = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    shifted = rows + values.offset
    starts, stops = (np.frombuffer(edges, kind)[each].tolist() for each in (shifted, shifted + 1))
    view = memoryview(b"" if content is None else content)
    views = [view[start:stop] for start, stop in zip(starts, stops, strict=True)]
    if not values.null_count:
        return list(views)
    pairs = zip(views, rows.tolist(), strict=True)
    return [own if values[row].is_valid else None for own, row in pairs]


def _parsed(texts: list[Any]) -> list[Any]:
    return [text if text is None else parse_json(text, origin="its JSON") for text in texts]


def _is_nested(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind)) and not is_file_column(kind)


def _is_list_of_files(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and is_file_column(kind.value_type)


class RowGroups(ABC):
    """The row groups of some files, numbered consecutively.

    Args:
        folder: The folder that the files are in.
        footers: The files, with the number of rows of each of their groups.

    Attributes:
        suffix: The suffix of the file names.
        file: The file of each group.
        first: The first group of each file, and the number of groups.
        ends: The first row of each group, and the number of rows.
        file_ends: The first row of each file, and the number of rows.
    """

    suffix: str

    def __init__(self, folder: str, footers: Sequence[ParquetFooter]) -> None:
        self.folder = folder
        self.footers = list(footers)
        counts = [len(footer.rows) for footer in footers]
        self.file = np.repeat(np.arange(len(counts)), counts)
        self.first = np.array([0, *accumulate(counts)])
        rows = np.array([n for footer in footers for n in footer.rows], np.int64)
        self.ends = np.concatenate(([0], np.cumsum(rows)))
        self.file_ends = np.array([0, *accumulate(sum(footer.rows) for footer in footers)])

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.ends[-1])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self.schema_of(0)

    @property
    def columns(self) -> Mapping[str, pa.DataType]:
        """The columns of all files, with the types to which their values are converted.

        If the values of two files cannot have the same type, it is that of the first one.
        """
        return self._columns[0]

    def check_columns(self, names: Iterable[str]) -> None:
        """Make sure that columns have the same type in all files, or can be converted to one.

        Raises:
            FormatError: If that is not the case, or a file has two columns of the same name.
        """
        _, problems = self._columns
        for name in names:
            if name in problems:
                raise FormatError(problems[name])

    @cached_property
    def _columns(self) -> tuple[dict[str, pa.DataType], dict[str, str]]:
        """The types of the columns, and the problems of some."""
        kinds: dict[str, pa.DataType] = {}
        files: dict[str, int] = {}
        problems: dict[str, str] = {}
        schemas = set()
        for number in range(len(self.footers)):
            schema = self.schema_of(number)
            if schema in schemas:
                continue
            schemas.add(schema)
            try:
                fields = list(zip(schema.names, schema, strict=True))
            except ValueError as error:
                raise FormatError(
                    f"{self.origin(number)}: the name of a column is not UTF-8 text: {error}; "
                    "write the file again"
                ) from error
            for name, field in fields:
                kind = plain_type(field.type)
                earlier = kinds.setdefault(name, kind)
                common = common_type(earlier, kind)
                if schema.names.count(name) > 1:
                    problems.setdefault(name, f"{self.origin(number)}: has two columns {name!r}")
                elif common is None:
                    problems.setdefault(
                        name,
                        f"{self.origin(number)}: has {kind} in column {name!r}, but "
                        f"{self.origin(files[name])} has {earlier} there, and no type has room for "
                        "both; write one of them with the type of the other, or leave the column "
                        "out with `read: {columns: […]}`",
                    )
                elif name not in files or common != earlier:
                    kinds[name], files[name] = common, number
        return kinds, problems

    @cached_property
    def partitions(self) -> dict[str, list[Any]]:
        """The values in the names of folders, as in `year=2024/`: by key, that of each file.

        They are whole numbers if all of a key are.
        """
        files = [_partitions(footer.name) for footer in self.footers]
        keys = dict.fromkeys(key for file in files for key in file)
        return {key: _whole_numbers([file.get(key) for file in files]) for key in keys}

    def column_types(self) -> dict[str, str]:
        """Return the types of the columns, and of the values in the names of folders."""
        types = {name: str(kind) for name, kind in self.columns.items() if is_data(name)}
        for key, values in self.partitions.items():
            types[key] = "int64" if any(isinstance(value, int) for value in values) else "string"
        return types

    def locate(self, group: int) -> tuple[int, int]:
        """Return the file of a group, and the number of the group in it."""
        number = int(self.file[group])
        return number, group - int(self.first[number])

    @abstractmethod
    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""

    @abstractmethod
    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""

    @abstractmethod
    def table(self, group: int, columns: tuple[str, ...]) -> RowTable:
        """Return some columns of a group."""

    def count_taken(self, group: int, columns: tuple[str, ...], num_rows: int) -> None:  # noqa: B027
        """Note that a number of rows were taken from the table of a group."""

    @abstractmethod
    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where some columns of a group begin and end in the file."""

    @abstractmethod
    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""


def _partitions(name: str) -> dict[str, str | None]:
    """Return the values encoded in the folders of a file name.

    Example:
        >>> _partitions("year=2024/lang=en/0.parquet")
        {'year': '2024', 'lang': 'en'}
    """
    steps = [step.partition("=") for step in name.split("/")[:-1] if "=" in step]
    return {
        unquote(key): None if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
        for key, _, value in steps
    }


def _whole_numbers(values: list[str | None]) -> list[Any]:
    """Return values as whole numbers if all of them are, and otherwise as they are."""
    given = [value for value in values if value is not None]
    if not all(value.isascii() and value.isdecimal() for value in given):
        return values
    return [None if value is None else int(value) for value in values]
