"""Values of Arrow columns, as the parts of samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.arrays import Ints

if TYPE_CHECKING:
    import pyarrow as pa

FEW_ROWS = 16
"""Rows of a group up to which values are taken one by one, without making an array first."""
SHORT_TABLE_ROWS = 256
_FILE_FIELDS = frozenset({"bytes", "path"})


class RowTable:
    """A table from which the values of a few rows at a time are taken.

    Args:
        table: The table.
        is_kept: Whether it is the same object until all rows have been taken. The columns of a
            short table are then converted as a whole, which costs no more than for a few rows.
    """

    def __init__(self, table: pa.Table, *, is_kept: bool = False) -> None:
        self.table = table
        self.num_bytes = table.nbytes
        self._is_kept = is_kept and table.num_rows <= SHORT_TABLE_ROWS
        self._values: dict[str, _Values] = {}

    def values(self, name: str, rows: Ints) -> _Values:
        """Return the values of some rows of a column, and their paths if they are files.

        Bytes are views, which are not copied: later code makes bytes of them if necessary.
        """
        found = self._values.get(name)
        if found is None:
            if not self._is_converted_whole(name):
                return _values_and_paths(self.table.column(name), rows)
            found = self._convert(name)
        values, paths = found
        numbers = rows.tolist()
        return [values[n] for n in numbers], paths and [paths[n] for n in numbers]

    def convert(self) -> None:
        """Convert the columns that are converted as a whole now, for example in another thread."""
        for name in self.table.column_names:
            if self._is_converted_whole(name):
                self._convert(name)

    def _is_converted_whole(self, name: str) -> bool:
        return self._is_kept and not _is_nested(self.table.schema.field(name).type)

    def _convert(self, name: str) -> _Values:
        every = np.arange(self.table.num_rows)
        found = self._values[name] = _values_and_paths(self.table.column(name), every)
        return found


_Values = tuple[list[Any], list[Any] | None]


def _values_and_paths(column: pa.ChunkedArray, rows: Ints) -> _Values:
    if _is_list_of_files(column.type):
        return _lists_of_files(column, rows)
    return _files(column, rows) if is_file_column(column.type) else (_values(column, rows), None)


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


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a column, however they are stored."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return small.get(kind, kind)


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
    import pyarrow as pa

    if len(rows) <= FEW_ROWS:
        return [column[row].as_py() for row in rows.tolist()]
    # Making an array of numbers in the usual way imports pandas, which takes a second.
    buffer = pa.py_buffer(np.ascontiguousarray(rows, np.int64))
    places = pa.Array.from_buffers(pa.int64(), len(rows), [None, buffer])
    return list(column.take(places).to_pylist())


def _views(values: pa.Array, rows: Ints) -> list[memoryview | None]:
    import pyarrow as pa

    _, edges, content = values.buffers()
    kind = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    places = rows + values.offset
    starts, stops = (np.frombuffer(edges, kind)[each].tolist() for each in (places, places + 1))
    view = memoryview(b"" if content is None else content)
    found = [view[start:stop] for start, stop in zip(starts, stops, strict=True)]
    if not values.null_count:
        return list(found)
    pairs = zip(found, rows.tolist(), strict=True)
    return [own if values[row].is_valid else None for own, row in pairs]


def _is_nested(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind)) and not is_file_column(kind)


def _is_list_of_files(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and is_file_column(kind.value_type)
