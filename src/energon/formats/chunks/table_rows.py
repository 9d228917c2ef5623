"""Rows that LitData stores as an Arrow table at the end of a chunk.

Its records are then empty. The table is a file or, in early versions, a stream of Arrow, followed
by its size (32-bit, little-endian) and eight bytes that mark it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from energon.errors import FormatError, needs_extra
from energon.messages import describe_error

if TYPE_CHECKING:
    import pyarrow as pa

_MARK = b"LDARW01\0"
_END = struct.Struct(f"<I{len(_MARK)}s")
_ARROW_FILE = b"ARROW1"


class TableRow:
    """A row of a record batch. Its length is about the number of bytes that it takes."""

    def __init__(self, batch: pa.RecordBatch, number: int) -> None:
        self._batch, self._number = batch, number

    def __len__(self) -> int:
        return int(self._batch.nbytes // max(1, self._batch.num_rows))

    def values(self, takes: Callable[[str], bool]) -> dict[str, Any]:
        """Return the columns that are taken."""
        columns = zip(self._batch.schema.names, self._batch.columns, strict=True)
        return {name: column[self._number].as_py() for name, column in columns if takes(name)}


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
            batch.validate(full=True)
            for number in range(start, batch.num_rows):
                yield TableRow(batch, number)
            start = max(0, start - batch.num_rows)
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        problem = describe_error(error)
        raise FormatError(
            f"{origin}: its rows are not a complete Arrow table: {problem}; copy it again"
        ) from error
