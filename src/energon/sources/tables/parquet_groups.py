"""The row groups of Parquet files, each read with a few ranges and decoded as a whole."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from energon.errors import EnergonError, FormatError, needs_extra
from energon.formats.parquet import ParquetFooter, parse_footer, row_batches
from energon.io.address import redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile
from energon.io.range_file import RangeFile
from energon.sources.decoded_blocks import DecodedBlocks
from energon.sources.source import Submit
from energon.sources.tables.columns import RowTable
from energon.sources.tables.parquet_files import PARQUET_SUFFIX, ParquetFiles
from energon.sources.tables.row_groups import RowGroups

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData

KEPT_FOOTERS = 64
"""Parsed footers that are kept: those of files with thousands of columns take megabytes."""


_Place = tuple[int, tuple[str, ...]]
"""A row group, and the columns of it that are decoded."""


class _DecodedGroup(NamedTuple):
    """A row group that is decoded, and has rows that nobody took."""

    table: RowTable
    rows_left: int


class ParquetGroups(RowGroups):
    """The row groups of some files, numbered consecutively.

    Args:
        files: The files of a dataset.
        footers: Those that are read, with what stands at their ends.
    """

    suffix = PARQUET_SUFFIX

    def __init__(self, files: ParquetFiles, footers: Sequence[ParquetFooter]) -> None:
        self.files = files
        super().__init__(files.folder, footers)
        self._metadata: OrderedDict[int, FileMetaData] = OrderedDict()
        self._decoded: DecodedBlocks[_Place, _DecodedGroup] = DecodedBlocks()
        self._range_files: dict[int, RangeFile] = {}

    @cached_property
    def _listed(self) -> list[ObjectInfo]:
        listed = {each.key: each for each in self.files.found}
        return [listed[footer.name] for footer in self.footers]

    def __reduce__(self) -> tuple[Any, ...]:
        return ParquetGroups, (self.files, self.footers)

    def schema_of(self, number: int) -> pa.Schema:
        """Return the columns of a file."""
        import pyarrow as pa

        try:
            return self.metadata(number).schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"{self.origin(number)}: its columns are not known to pyarrow: {error}; write the "
                "file again with other types"
            ) from error

    def metadata(self, number: int) -> FileMetaData:
        """Return what a file says about its content."""
        found = self._metadata.get(number)
        if found is None:
            footer = self.footers[number].footer
            found = self._metadata[number] = parse_footer(footer, origin=self.origin(number))
            if len(self._metadata) > KEPT_FOOTERS:
                self._metadata.popitem(last=False)
        return found

    def origin(self, number: int) -> str:
        """Return the name of a file for messages."""
        return redact(self.files.path(self.footers[number].name))

    def table(self, group: int, columns: tuple[str, ...], *, num_rows: int) -> RowTable:
        """Return some columns of a row group, of which the caller takes a number of rows.

        Until all of its rows were taken, the same is returned again, for as long as there is
        memory: an epoch takes each row once, and the memory serves the next row group.

        Raises:
            FormatError: If it is damaged.
        """
        place = group, columns
        found = self._decoded.get(place) or self._made(place)
        left = found.rows_left - num_rows
        if left > 0:
            self._decoded.keep(place, found._replace(rows_left=left), found.table.num_bytes)
        else:
            self._decoded.drop(place)
        return found.table

    def decode_ahead(
        self, groups: Sequence[int], columns: tuple[str, ...], submit: Submit, *, most: int
    ) -> None:
        """Begin to decode the row groups that are read next; errors are raised by `table`."""
        places = [(group, columns) for group in groups]
        self._decoded.begin(places, self._made_ahead, submit, most=most)

    def chunks(self, group: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return where the contents of some columns of a row group begin and end in the file."""
        number, own = self.place(group)
        metadata = self.metadata(number).row_group(own)
        found = []
        for at in range(metadata.num_columns):
            chunk = metadata.column(at)
            if chunk.path_in_schema.split(".")[0] in columns or chunk.path_in_schema in columns:
                starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
                start = min(each for each in starts if each)
                found.append((start, start + chunk.total_compressed_size))
        size = self.footers[number].size
        if any(not 4 <= start <= stop <= size for start, stop in found):
            raise FormatError(f"{self.origin(number)}: a column is outside the file; it is damaged")
        return sorted(found)

    def range_file(self, number: int) -> RangeFile:
        """Return a file, open for reading ranges."""
        found = self._range_files.get(number)
        if found is None:
            found = self._range_files[number] = self.files.open(self._listed[number])
        return found

    def _made(self, place: _Place) -> _DecodedGroup:
        table = self._decode(*place)
        return _DecodedGroup(RowTable(table, self.columns, is_kept=True), table.num_rows)

    def _made_ahead(self, place: _Place) -> _DecodedGroup:
        made = self._made(place)
        made.table.convert()
        return made

    def _decode(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        with needs_extra("parquet", "Parquet files need pyarrow"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        number, own = self.place(group)
        metadata = self.metadata(number)
        size = self.footers[number].size
        source = _Chunks(self.range_file(number), size, self.chunks(group, columns))
        try:
            # What it would read ahead of time, in threads of its own, was read above.
            reader = pq.ParquetFile(pa.PythonFile(source, "r"), metadata=metadata, pre_buffer=False)
            batches = list(row_batches(reader, own, columns, source, origin=self.origin(number)))
            schema = None if batches else reader.read_row_group(own, columns=list(columns)).schema
            table = pa.Table.from_batches(batches, schema)
        except EnergonError:
            raise
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            reason = " ".join(str(error).split()).rstrip(".")  # several lines of pyarrow
            raise FormatError(
                f"{self.origin(number)}: row group {own} cannot be read: {reason}; the file is "
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
        starts, sizes = [start for start, _ in ranges], [stop - start for start, stop in ranges]
        if isinstance(file, OpenFile):
            contents = [_read_to_arrow(file, *each) for each in zip(starts, sizes, strict=True)]
        else:
            contents = [memoryview(content) for content in file.pread_many(starts, sizes)]
        self._chunks = dict(zip(starts, contents, strict=True))
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

    def read(self, size: int = -1) -> Any:
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        self._at = stop
        for low, content in self._chunks.items():
            if low <= start and stop <= low + len(content):
                return content[start - low : stop - low]
        return self._file.pread(start, max(0, stop - start))


def _read_to_arrow(file: OpenFile, start: int, size: int) -> memoryview:
    """Return a range of a file, in memory that Arrow has used for earlier ones.

    New memory for each row group would take three times as long as reading into it.
    """
    import pyarrow as pa

    content = memoryview(pa.allocate_buffer(size))
    file.pread_into(start, content)
    return content
