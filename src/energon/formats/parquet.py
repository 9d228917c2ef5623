"""The footers of Parquet files, a table of them, and the card that divides files into splits.

A Parquet file ends with a footer that locates everything in it, the four bytes of the footer's
size, and `PAR1`. A thousand files take a thousand reads, so `.nv-meta/parquet.footers` stores the
footers of a whole folder:

| bytes | content |
|---|---|
| 8 | `ENFOOT01` |
| 8 | H, little-endian |
| H | JSON: `{"files": [[name, size, version, bytes of the footer, [rows of each row group]], …]}` |
| … | the footers, including size and `PAR1`, one after another |

The version is the ETag of a remote file, and the time of the last change of a local one.

The card of a dataset on the Hugging Face Hub, `README.md`, assigns files to splits. It begins with
YAML between two lines `---`, in which `configs` may list configurations:

    configs:
    - config_name: en
      default: true
      data_files:
      - split: train
        path: en/train-*.parquet
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError, needs_extra
from energon.formats.meta import yaml
from energon.limits import DECODED_BYTES, DOCUMENT_BYTES, PARQUET_FOOTER_BYTES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData


PARQUET_MAGIC = b"PAR1"
TAIL_BYTES = 8
FOOTERS = "parquet.footers"
_TABLE = b"ENFOOT01"
ROW_BATCH_BYTES = 256 << 20
"""Bytes that a batch of rows is decoded to, roughly. An Arrow array has room for 2 GiB."""
PYTHON_ROWS = 256
"""Rows that are Python objects at the same time, at most."""
_HEADER_BYTES = 4 << 10
"""Bytes in which the header of a page is expected; statistics make some longer."""
_VALUE_BYTES = 16
"""Bytes that a value takes at most besides the content of its page: offset, validity, padding."""


@dataclass(frozen=True)
class ParquetFooter:
    """The metadata of a file.

    Args:
        name: Its path below the folder.
        size: Size of the file in bytes.
        version: Differs when its content does.
        footer: The end of the file, from the footer on.
        rows: Number of rows of each row group.
    """

    name: str
    size: int
    version: str
    footer: bytes
    rows: tuple[int, ...]


def footer_bytes(tail: bytes, *, size: int, origin: str) -> int:
    """Return how many bytes the end of a file has, from the footer on.

    Args:
        tail: Its last 8 bytes, or more.
        size: Bytes of the file.
        origin: The file, for messages.

    Raises:
        TruncatedError: If it does not end as Parquet files do.
        FormatError: If it is encrypted, or its footer is larger than the file or a limit.
    """
    if size < len(PARQUET_MAGIC) + TAIL_BYTES or tail[-4:] not in (PARQUET_MAGIC, b"PARE"):
        raise TruncatedError(
            f"{origin}: {size} bytes that end with {tail[-4:]!r}, not with {PARQUET_MAGIC!r}; it "
            "is truncated, or not a Parquet file"
        )
    if tail[-4:] != PARQUET_MAGIC:
        raise FormatError(f"{origin}: is encrypted, which is not supported; write it unencrypted")
    length = struct.unpack("<I", tail[-8:-4])[0] + TAIL_BYTES
    if length > size - len(PARQUET_MAGIC):
        raise FormatError(
            f"{origin}: its footer has {length} bytes, but the whole file only {size}"
        )
    if length > PARQUET_FOOTER_BYTES.value:
        raise FormatError(
            f"{origin}: its footer has {length} bytes, more than {PARQUET_FOOTER_BYTES.value}; "
            f"{PARQUET_FOOTER_BYTES.hint}"
        )
    return int(length)


def parse_footer(footer: bytes, *, origin: str) -> FileMetaData:
    """Parse the footer of a file.

    Raises:
        FormatError: If it is damaged.
        MissingExtraError: If pyarrow is not installed.
    """
    with needs_extra("parquet", "Parquet files need pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        return pq.read_metadata(io.BytesIO(PARQUET_MAGIC + footer))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{origin}: its footer is damaged: {error}") from error


def group_rows(metadata: FileMetaData, *, origin: str) -> tuple[int, ...]:
    """Return the rows of each row group.

    Raises:
        FormatError: If they are invalid.
    """
    groups = range(metadata.num_row_groups)
    rows = tuple(int(metadata.row_group(number).num_rows) for number in groups)
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise FormatError(
            f"{origin}: its row groups have {sum(rows)} rows, the file {metadata.num_rows}; it is "
            "damaged"
        )
    return rows


def is_json(kind: Any) -> bool:
    """Return whether a column of an Arrow type holds texts of JSON.

    That is what Hugging Face `datasets` writes for its feature `Json()`.
    """
    return getattr(kind, "extension_name", None) == "arrow.json"


def row_batches(
    source: Any,
    metadata: FileMetaData,
    group: int,
    columns: Sequence[str],
    *,
    origin: str,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a row group in batches of bounded size, at least one.

    A dictionary may expand from a few hundred bytes to gigabytes. The headers of the pages say how
    many values there are, and the dictionary how long each of them can be: a column that could
    become large stays a dictionary.

    Args:
        source: The file.
        metadata: Its footer.
        group: Number of the row group.
        columns: The columns to read.
        origin: The file, for messages.

    Raises:
        FormatError: If the rows have more than `DECODED_BYTES`, or the header of a page is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = f"{origin}: row group {group}"
    rows, dictionaries = _plan_batches(source, metadata, group, columns, where)
    file = pq.ParquetFile(
        pa.PythonFile(source, "r"),
        metadata=metadata,
        pre_buffer=False,
        read_dictionary=dictionaries,
    )
    decoded, batch = 0, None
    # Several threads would decode several columns at once.
    for batch in file.iter_batches(
        rows, row_groups=[group], columns=list(columns), use_threads=False
    ):
        decoded += batch.nbytes
        if decoded > DECODED_BYTES.value:
            raise _too_large(f"{where} has at least", decoded)
        yield batch
    if batch is None:
        empty = file.read_row_group(group, columns=list(columns))
        yield pa.RecordBatch.from_pylist([], schema=empty.schema)


def _plan_batches(
    source: Any, metadata: FileMetaData, group: int, columns: Sequence[str], where: str
) -> tuple[int, list[str]]:
    """Return the rows of a batch of a row group, and the columns that stay dictionaries."""
    row_group = metadata.row_group(group)
    sizes = _PageSizes()
    dictionaries: list[str] = []
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        name = column.path_in_schema
        if name not in columns and name.split(".")[0] not in columns:
            continue
        pages = _read_pages(source, column, origin=where)
        size = pages.plain_bytes + pages.expanded_bytes
        if metadata.schema.column(number).max_repetition_level:
            if size > DECODED_BYTES.value:
                # All values may be in one row, the smallest batch.
                raise _too_large(f"{where} has lists in column {name!r} that may have", size)
        elif column.physical_type != "BYTE_ARRAY":
            if size > DECODED_BYTES.value:
                raise _too_large(f"{where} has in column {name!r}", size)
        elif (
            pages.expanded_bytes > ROW_BATCH_BYTES
            and not pages.other_references
            # pyarrow has no dictionaries of JSON or decimal numbers.
            and metadata.schema.column(number).logical_type.type in ("NONE", "STRING")
        ):
            dictionaries.append(name)
            pages.expanded_bytes = 0
        sizes = _PageSizes(*(a + b for a, b in zip(astuple(sizes), astuple(pages), strict=True)))
    if sizes.unpacked_bytes > DECODED_BYTES.value:
        raise _too_large(f"{where} has", sizes.unpacked_bytes)
    rows = max(1, row_group.num_rows)
    if sizes.plain_bytes > ROW_BATCH_BYTES:
        rows = max(1, rows * ROW_BATCH_BYTES // sizes.plain_bytes)
    if sizes.expanded_bytes > ROW_BATCH_BYTES:
        rows = max(1, min(rows, ROW_BATCH_BYTES // sizes.longest_value))
    return rows, dictionaries


def python_rows(
    source: Any, metadata: FileMetaData, group: int, columns: Sequence[str], *, origin: str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a row group as Python objects, few of which are in memory.

    For the arguments, see `row_batches`.

    Raises:
        FormatError: As in `row_batches`; also if the values would have more than `DECODED_BYTES`
            when each of them is written down.
    """
    size = 0
    for batch in row_batches(source, metadata, group, columns, origin=origin):
        own = sum(map(value_bytes, batch.columns))
        size += own
        if size > DECODED_BYTES.value:
            raise _too_large(f"{origin}: row group {group} has at least", size)
        step = batch.num_rows * ROW_BATCH_BYTES // max(own, ROW_BATCH_BYTES)
        step = min(PYTHON_ROWS, max(1, step))
        for start in range(0, batch.num_rows, step):
            yield from batch.slice(start, step).to_pylist()


def value_bytes(values: pa.Array | pa.ChunkedArray) -> int:
    """Return how many bytes values have if each of them is stored, or more.

    Dictionaries, runs and views refer to the same bytes many times.
    """
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        return sum(map(value_bytes, values.chunks))
    if isinstance(values, pa.ExtensionArray):
        return value_bytes(values.storage)
    kind, types = values.type, pa.types
    if not has_references(kind):
        return int(values.nbytes)
    if types.is_dictionary(kind):
        numbers = values.indices.drop_null()
        if not len(numbers):
            return 0
        # `to_numpy` imports pandas, which takes a second.
        indices = np.frombuffer(numbers.buffers()[1], str(numbers.type))[numbers.offset :]
        return int(_sizes(values.dictionary)[indices[: len(numbers)]].sum())
    if types.is_struct(kind):
        return sum(map(value_bytes, values.flatten()))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return value_bytes(values.flatten())
    if types.is_map(kind):
        return value_bytes(values.keys) + value_bytes(values.items)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return int(_sizes(values).sum()) if len(values) else 0
    return len(values) * int(values.nbytes)


@lru_cache(maxsize=4096)
def has_references(kind: pa.DataType) -> bool:
    """Return whether values of a type can refer to the same bytes as others: `value_bytes`."""
    import pyarrow as pa

    types = pa.types
    return (
        types.is_dictionary(kind)
        or types.is_run_end_encoded(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
        or any(has_references(kind.field(at).type) for at in range(kind.num_fields))
    )


def _sizes(values: pa.Array) -> NDArray[np.int64]:
    """Return how many bytes each of some values has, or those of all for each."""
    import pyarrow as pa

    kind, types = values.type, pa.types
    buffer, start, stop = values.buffers()[1], values.offset, values.offset + len(values)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return np.frombuffer(buffer, np.int32)[::4][start:stop].astype(np.int64)
    for width, has_width in (
        (np.int32, types.is_string(kind) or types.is_binary(kind)),
        (np.int64, types.is_large_string(kind) or types.is_large_binary(kind)),
    ):
        if has_width:
            return np.diff(np.frombuffer(buffer, width)[start : stop + 1]).astype(np.int64)
    size = values.type.bit_width // 8 if types.is_primitive(kind) else value_bytes(values)
    return np.full(len(values), size)


def _too_large(subject: str, size: int) -> FormatError:
    return FormatError(
        f"{subject} {size} bytes, more than {DECODED_BYTES.value}; {DECODED_BYTES.hint}"
    )


@dataclass
class _PageSizes:
    """How large the values in the pages of a column, or of several, can be.

    Args:
        unpacked_bytes: Bytes of the pages without their compression.
        plain_bytes: The most bytes of the values that are stored one by one.
        expanded_bytes: The most bytes of the values that are stored by reference to other values.
        longest_value: The most bytes of one of these.
        other_references: Pages whose values refer to others than those of a dictionary.
    """

    unpacked_bytes: int = 0
    plain_bytes: int = 0
    expanded_bytes: int = 0
    longest_value: int = 0
    other_references: int = 0


def _read_pages(source: Any, column: ColumnChunkMetaData, *, origin: str) -> _PageSizes:
    """Read the headers of the pages of a column."""
    starts = (column.data_page_offset, column.dictionary_page_offset)
    at = min(start for start in starts if start)
    stop = at + column.total_compressed_size
    pages, longest = _PageSizes(), 0
    try:
        while at < stop:
            header, length = _page_header(source, at, stop)
            at += length
            kind, unpacked, packed = header[1], header[2], header[3]
            if min(unpacked, packed) < 0:
                raise ValueError(f"a page has {packed} bytes, {unpacked} of content")
            pages.unpacked_bytes += unpacked
            if kind == _DICTIONARY:
                longest = _longest_value(source, at, header, column)
            elif kind in (_DATA, _DATA_V2):
                data_header = header[5] if kind == _DATA else header[8]
                values, encoding = data_header[1], data_header[2 if kind == _DATA else 4]
                pages.plain_bytes += unpacked + values * _VALUE_BYTES
                if encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
                    pages.expanded_bytes += values * longest
                    pages.longest_value = max(pages.longest_value, longest)
                elif encoding == _DELTA_BYTE_ARRAY:  # each value may repeat the one before
                    pages.other_references += 1
                    pages.expanded_bytes += values * unpacked
                    pages.longest_value = max(pages.longest_value, unpacked)
            at += packed
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{origin} cannot be read: a page of column {column.path_in_schema!r} has a damaged "
            f"header ({error}); restore the file"
        ) from error
    return pages


_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PLAIN_DICTIONARY, _DELTA_BYTE_ARRAY, _RLE_DICTIONARY = 2, 7, 8


def _page_header(source: Any, at: int, stop: int) -> tuple[dict[int, Any], int]:
    """Return the header of a page by the numbers of its fields, and its length."""
    length = _HEADER_BYTES
    while True:
        source.seek(at)
        reader = _ThriftReader(bytes(source.read(min(length, stop - at))))
        try:
            return reader.struct(), reader.at
        except IndexError:
            if length >= stop - at:
                raise
            length *= 16


def _longest_value(
    source: Any, at: int, header: Mapping[int, Any], column: ColumnChunkMetaData
) -> int:
    """Return how long the longest value of a dictionary is."""
    unpacked, packed, count = header[2], header[3], header[7][1]
    if column.physical_type != "BYTE_ARRAY":
        return int(-(-unpacked // max(1, count)))
    if unpacked > DECODED_BYTES.value:
        return int(unpacked)
    source.seek(at)
    content = bytes(source.read(packed))
    if column.compression != "UNCOMPRESSED":
        import pyarrow as pa

        codec = "lz4_raw" if column.compression == "LZ4" else column.compression.lower()
        try:
            content = pa.decompress(content, unpacked, codec, asbytes=True)
        except (pa.ArrowException, OSError):
            return int(unpacked)  # reading the column reports it
    longest, at = 0, 0
    while at + 4 <= len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        longest, at = max(longest, size), at + 4 + size
    return min(longest, int(unpacked))


@dataclass
class _ThriftReader:
    """Reads structs in the compact protocol of Thrift, up to the depth that pages have."""

    data: bytes
    at: int = field(default=0, init=False)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of the next struct by number.

        Raises:
            IndexError: If the data end in it.
            ValueError: If it is invalid.
        """
        if depth > 4:
            raise ValueError("structs are nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._integer()
            fields[number] = self._value(byte & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 8:
            size = self._varint()
            if self.at + size > len(self.data):
                raise IndexError("a text ends beyond the data")
            self.at += size
            return None  # statistics, which nothing here needs
        if kind == 12:
            return self.struct(depth + 1)
        raise ValueError(f"a field is of the unexpected type {kind}")

    def _byte(self) -> int:
        byte = self.data[self.at]
        self.at += 1
        return byte

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError("a number has more than 64 bits")
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def dump_footers(files: Sequence[ParquetFooter]) -> bytes:
    """Return the content of a table of footers."""
    rows = [[f.name, f.size, f.version, len(f.footer), list(f.rows)] for f in files]
    head = json.dumps({"files": rows}).encode()
    return b"".join((_TABLE, struct.pack("<Q", len(head)), head, *(f.footer for f in files)))


def load_footers(data: Any, *, origin: str) -> list[ParquetFooter]:
    """Return the footers of a table.

    Raises:
        FormatError: If it is damaged.
    """
    again = "it is damaged, run `energon prepare` again"
    if len(data) < 16 or bytes(data[:8]) != _TABLE:
        raise FormatError(f"{origin}: begins with {bytes(data[:8])!r}; {again}")
    at = 16 + struct.unpack("<Q", data[8:16])[0]
    if at > min(len(data), DOCUMENT_BYTES.value):
        raise TruncatedError(f"{origin}: its list of files ends at byte {at}; {again}")
    files = []
    try:
        for name, size, version, length, rows in json.loads(bytes(data[16:at]))["files"]:
            footer = bytes(data[at : at + length])
            if len(footer) != length or length < TAIL_BYTES or min(rows, default=0) < 0:
                raise ValueError(f"the footer of {name} is missing")
            files.append(ParquetFooter(str(name), int(size), str(version), footer, tuple(rows)))
            at += length
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{origin}: {error}; {again}") from error
    return files


CARD = "README.md"


class CardConfig(NamedTuple):
    """A configuration: one of the datasets of a repository."""

    name: str
    is_default: bool
    splits: Mapping[str, Sequence[str]]
    """The patterns of the files of each split."""


def parse_card(text: str, *, origin: str) -> list[CardConfig]:
    """Return the configurations that a card lists, if any.

    Raises:
        FormatError: If its YAML is damaged, or lists them in another form.
    """
    head, _, rest = text.partition("---")
    front, mark, _ = rest.partition("\n---")
    if head.strip() or not mark:
        return []
    document = yaml.load(front, origin=origin)
    listed = document.get("configs") if isinstance(document, Mapping) else None
    if listed is None:
        return []
    try:
        configs = [_config(each) for each in listed]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{origin}: configs: expected a list of {{config_name, data_files}}: {error!r}"
        ) from error
    return [each for each in configs if each.splits]


def _config(fields: Mapping[str, Any]) -> CardConfig:
    name = str(fields["config_name"])
    folder = str(fields.get("data_dir") or "").strip("/")
    files = fields.get("data_files")
    if files is None:
        splits = {"": [f"{folder}/**".lstrip("/")]} if folder else {}
    elif isinstance(files, str):
        splits = {"train": [files]}
    elif all(isinstance(each, str) for each in files):
        splits = {"train": list(files)}
    else:
        splits = {}
        for each in files:
            paths = each["path"]
            own = [paths] if isinstance(paths, str) else [str(path) for path in paths]
            splits.setdefault(str(each["split"]), []).extend(own)
    below = f"{folder}/" if folder and files is not None else ""
    return CardConfig(
        name,
        fields.get("default") is True or name == "default",
        {split: [f"{below}{path}" for path in paths] for split, paths in splits.items()},
    )
