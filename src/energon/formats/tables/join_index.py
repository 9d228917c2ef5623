"""The index of a join: which samples of several datasets belong together.

One row for each joined sample. All numbers are little-endian.

| bytes | content |
|---|---|
| 8 | magic `ENERGJN1` |
| 8 | bytes of the rest after this header (uint64) |
| 4 | CRC-32 of that rest (uint32) |
| 4 | bytes of the JSON (uint32) |
| … | JSON, spaces at its end up to a multiple of 8 |
| … | columns, each beginning at a multiple of 8 |

The JSON has the number of `rows`, and `columns`, a list of numpy types, one for each dataset: its
column holds the number of the sample for each row, -1 for none. null instead of a type means that
the sample has the number of the row, and there is no column.

Samples are matched by the hashes of their keys, see `key_hash`.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import FormatError, TruncatedError
from energon.formats.text import parse_json
from energon.limits import check_document
from energon.local_file import map_file

JOIN_MAGIC = b"ENERGJN1"
MISSING = -1
_HEADER = struct.Struct("<8sQII")
_TYPES = ("<i4", "<i8")
_CHUNK = 1 << 20
_AGAIN = "delete it, and it is built again"


@dataclass(frozen=True, eq=False)
class JoinIndex:
    """Which samples of several datasets belong together.

    Args:
        num_rows: How many joined samples there are.
        columns: For each dataset the number of its sample in each row, -1 for none; None if
            samples have the numbers of the rows.
        path: The file that it is mapped from; None if it is in memory only.
    """

    num_rows: int
    columns: tuple[NDArray[Any] | None, ...] = field(repr=False)
    path: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            # Workers map the file too: a copy would be as large as the file.
            return _open, (self.path,)
        return JoinIndex, (self.num_rows, self.columns)

    def ordinals(self, column: int, rows: Ints) -> Ints:
        """Return the samples of a dataset in some rows; -1 for none."""
        found = self.columns[column]
        return rows if found is None else found[rows].astype(np.int64)

    def rows_with(self, column: int, numbers: Ints) -> Ints:
        """Return the rows with any of these samples of a dataset, ascending.

        Args:
            column: The dataset.
            numbers: The samples, ascending.
        """
        values = self.columns[column]
        if values is None or not len(numbers):
            return numbers
        found = [
            np.flatnonzero(np.isin(values[start : start + _CHUNK], numbers)) + start
            for start in range(0, self.num_rows, _CHUNK)
        ]
        return np.concatenate([np.empty(0, np.int64), *found])

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JoinIndex:
        """Map the index at `path` into memory.

        Raises:
            FileNotFoundError: If there is none.
            FormatError: If it is not a join index, or truncated.
        """
        data = map_file(path)
        if len(data) < _HEADER.size:
            raise TruncatedError(f"{path}: is too short for a join index; {_AGAIN}")
        magic, length, _, text_length = _HEADER.unpack_from(data)
        if magic != JOIN_MAGIC:
            raise FormatError(f"{path}: begins with {magic!r}, expected {JOIN_MAGIC!r}; {_AGAIN}")
        if len(data) != _HEADER.size + length:
            raise TruncatedError(
                f"{path}: has {len(data)} bytes, expected {_HEADER.size + length}; {_AGAIN}"
            )
        check_document(text_length, str(path))
        position = _HEADER.size + text_length
        columns: list[NDArray[Any] | None] = []
        try:
            about = parse_json(bytes(data[_HEADER.size : position]), origin="JSON")
            if type(about["rows"]) is not int or about["rows"] < 0:
                raise ValueError(f"{about['rows']!r} rows")
            for dtype in about["columns"]:
                if dtype is None:
                    columns.append(None)
                    continue
                if dtype not in _TYPES:
                    raise ValueError(f"a column of {dtype!r}")
                columns.append(np.frombuffer(data, dtype, about["rows"], position))
                size = about["rows"] * np.dtype(dtype).itemsize
                position += size + -size % 8
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path}: is damaged: {error}; {_AGAIN}") from error
        return cls(about["rows"], tuple(columns), os.path.abspath(path))


def _open(path: str) -> JoinIndex:
    # A function of the module: cloudpickle would send a method of a class by value.
    return JoinIndex.open(path)


def write_join_index(
    path: str | os.PathLike[str],
    columns: Sequence[NDArray[np.int64] | None],
    *,
    num_rows: int,
) -> None:
    """Write an index in one pass over columns, which may be larger than memory.

    Args:
        path: Where to; not renamed into place here.
        columns: As in `JoinIndex`.
        num_rows: How many joined samples there are.
    """
    types = [None if column is None else _smallest(column) for column in columns]
    text = json.dumps({"rows": num_rows, "columns": types}).encode()
    text += b" " * (-(_HEADER.size + len(text)) % 8)
    with open(path, "wb") as file:
        file.write(bytes(_HEADER.size))
        checksum = _write(file, text, 0)
        for column, dtype in zip(columns, types, strict=True):
            if column is None or dtype is None:
                continue
            for start in range(0, num_rows, _CHUNK):
                block = column[start : start + _CHUNK].astype(dtype).tobytes()
                checksum = _write(file, block, checksum)
            checksum = _write(file, bytes(-file.tell() % 8), checksum)
        length = file.tell() - _HEADER.size
        file.seek(0)
        file.write(_HEADER.pack(JOIN_MAGIC, length, checksum, len(text)))


def _write(file: BinaryIO, data: bytes, checksum: int) -> int:
    file.write(data)
    return zlib.crc32(data, checksum)


def _smallest(column: NDArray[np.int64]) -> str:
    largest = max(
        (int(column[at : at + _CHUNK].max()) for at in range(0, len(column), _CHUNK)), default=0
    )
    return "<i4" if largest < 1 << 31 else "<i8"
