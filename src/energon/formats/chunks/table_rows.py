"""Rows that LitData stores as an Arrow table at the end of a chunk.

Its records are then empty. The table is a file or, in early versions, a stream of Arrow, followed
by its size (32-bit, little-endian) and eight bytes that mark it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from energon.errors import FormatError, needs_extra
from energon.messages import describe_error

if TYPE_CHECKING:
    import pyarrow as pa

_MARK = b"LDARW01\0"
_END = struct.Struct(f"<I{len(_MARK)}s")
_ARROW_FILE = b"ARROW1"


class TableRow:
    """A row of a record batch. Its length is about the number of bytes that it takes.

    Args:
        batch: The record batch.
        names: The names of its columns.
        number: Which of its rows it is.
        is_valid: Whether the batch is known to be valid; otherwise, the row is checked.
    """

    def __init__(
        self, batch: pa.RecordBatch, names: Sequence[str], number: int, is_valid: bool
    ) -> None:
        self._batch, self._names = batch, names
        self._number, self._is_valid = number, is_valid

    def __len__(self) -> int:
        return int(self._batch.nbytes // max(1, self._batch.num_rows))

    def values(self, takes: Callable[[str], bool], origin: object) -> dict[str, Any]:
        """Return the columns that are taken.

        Raises:
            FormatError: If a value cannot be read.
        """
        row = self._batch.slice(self._number, 1)
        columns = zip(self._names, row.columns, strict=True)
        taken = {name: column for name, column in columns if takes(name)}
        try:
            if not self._is_valid:
                for column in taken.values():
                    column.validate(full=True)
            return {name: column[0].as_py() for name, column in taken.items()}
        except Exception as error:  # text that is not UTF-8, for example
            problem = describe_error(error)
            raise FormatError(f"{origin}: has a value that cannot be read: {problem}") from error


def has_table(data: bytes) -> bool:
    """Return whether a chunk ends with a table."""
    return data.endswith(_MARK)


def table_rows(data: bytes, origin: object, start: int = 0) -> Iterator[TableRow]:
    """Yield the rows of the table at the end of a chunk, from number `start` on.

    Raises:
        FormatError: If the table is damaged.
        MissingExtraError: If pyarrow is not installed.
    """
    with needs_extra("parquet", f"{origin}: its rows are an Arrow table, which needs pyarrow"):
        import pyarrow as pa
    size, _ = _END.unpack_from(data, len(data) - _END.size)
    begin = len(data) - _END.size - size
    try:
        table = pa.py_buffer(data).slice(begin, size)
        is_file = data[begin : begin + len(_ARROW_FILE)] == _ARROW_FILE
        batches = pa.ipc.open_file(table) if is_file else pa.ipc.open_stream(table)
        for batch in batches.read_all().to_batches():
            batch.validate()
            names, is_valid = batch.schema.names, _is_valid(batch)
            for number in range(start, batch.num_rows):
                yield TableRow(batch, names, number, is_valid)
            start = max(0, start - batch.num_rows)
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        problem = describe_error(error)
        raise FormatError(
            f"{origin}: its rows are not a complete Arrow table: {problem}; copy it again"
        ) from error


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Return whether all values of a batch are valid."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
