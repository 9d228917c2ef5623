"""The encoding of a part table, which contains the position of every part in a shard.

A file beside the shard, `x.tar.parts` for `x.tar`, with which readers take content without
parsing a tar header. It is mapped into memory, and what follows from the rest is left out, as
the names of parts where all samples have the same. All numbers are little-endian.

| bytes | content |
|---|---|
| 8 | magic `ENERGPT3`, whose last letter is the version of this layout |
| 8 | bytes of the rest after this header (uint64) |
| 4 | CRC-32 of that rest (uint32) |
| 4 | bytes of the JSON (uint32) |
| … | JSON, see below, spaces at its end |
| … | columns, each beginning at a multiple of 8 |

The JSON has `samples` N, `parts` P, `shard_size`, `shard_mtime_ns`, the `names` of parts in
hexadecimal UTF-8, and `columns`, a list of [name, type, length] in their order in the file, all of
unsigned integers:

| column | length | content | left out if there is |
|---|---|---|---|
| `sample_block` | N+1 | 512-byte block in which each sample begins, and the last ends | `header` |
| `part_block` | P | block in which the content of each part begins | |
| `part_size` | P | bytes of content | |
| `first_part` | N+1 | number of the first part of each sample, and P | `schema` |
| `part_name` | P | index of the name of each part | `schema` |
| `key_start` | N+1 | where each key begins, and the length of all | `key_length` |
| `key_order` | N | the samples in the order of their keys | ascending keys |
| `part_crc32` | P | CRC-32 of each content | nothing read of contents |
| `key_bytes` | | the keys, UTF-8 | |

`header` has two numbers: how many blocks before the content of its first part every sample
begins, and the block in which the last one ends. `schema` has the indices of the names that
every sample has, in their order; `key_length` is the length of every key; `unique` is true
if each key occurs once.

Whatever else is read from or written to these bytes is another version. Tables of other versions
are not read: they say nothing that the shard does not, which is indexed again.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError
from energon.formats.tar.headers import BLOCK
from energon.formats.text import parse_json
from energon.local_file import map_file, open_descriptor

TABLE_MAGIC = b"ENERGPT3"
_FAMILY = TABLE_MAGIC[:-1]
FIELDS = {
    "samples": "num_samples",
    "parts": "num_parts",
    "shard_size": "shard_size",
    "shard_mtime_ns": "shard_mtime_ns",
    "names": "part_names",
    "header": "header",
    "schema": "schema",
    "key_length": "key_length",
    "unique": "unique",
}
"""The fields of the JSON apart from the columns, and the attributes of a table that they hold."""
SMALL_TABLE_BYTES = 16 << 10
"""Tables of fewer bytes are read: to map them would take longer."""
AGAIN = "`energon index` on its dataset rewrites it"
_HEADER = struct.Struct("<8sQII")
_TYPES = frozenset(np.dtype(f"<u{size}").str for size in (1, 2, 4, 8))
_MAX_NUMBER = (1 << 62) - 1
_MAX_BLOCK = _MAX_NUMBER // BLOCK
Column = NDArray[Any]


def encode_part_table(
    fields: Mapping[str, Any], columns: Mapping[str, Column], key_bytes: bytes
) -> bytes:
    """Return the content of a part table.

    Args:
        fields: What the JSON has, all but the list of columns.
        columns: The columns by name.
        key_bytes: All keys.
    """
    listed = [[name, column.dtype.str, len(column)] for name, column in columns.items()]
    text = json.dumps({**fields, "columns": listed}).encode()
    text += b" " * (-(_HEADER.size + len(text)) % 8)
    body = text + b"".join(_padded(column.tobytes()) for column in columns.values()) + key_bytes
    return _HEADER.pack(TABLE_MAGIC, len(body), zlib.crc32(body), len(text)) + body


def decode_part_table(
    data: Any, *, origin: str, verify: bool
) -> tuple[dict[str, Any], dict[str, Column], memoryview]:
    """Return the JSON header, the columns and the keys, without copying them.

    Args:
        data: A buffer with the whole file.
        origin: Its name in messages.
        verify: Whether to check the CRC and all numbers, which reads all of it.

    Raises:
        FormatError: If it is not a part table, or damaged.
    """
    if len(data) < _HEADER.size:
        raise TruncatedError(f"{origin}: has {len(data)} bytes, not a part table; {AGAIN}")
    magic, length, checksum, text_length = _HEADER.unpack_from(data)
    if has_other_version(data):
        raise FormatError(
            f"{origin}: is a part table of another version, {magic!r}, expected "
            f"{TABLE_MAGIC!r}; {AGAIN}"
        )
    if magic != TABLE_MAGIC:
        raise FormatError(f"{origin}: begins with {magic!r}, expected {TABLE_MAGIC!r}; {AGAIN}")
    if len(data) != _HEADER.size + length:
        raise TruncatedError(
            f"{origin}: has {len(data)} bytes, expected {_HEADER.size + length}; {AGAIN}"
        )
    if verify and zlib.crc32(memoryview(data)[_HEADER.size :]) != checksum:
        raise FormatError(f"{origin}: checksum does not match; {AGAIN}")
    position = _HEADER.size + text_length
    columns: dict[str, Column] = {}
    try:
        fields: dict[str, Any] = parse_json(bytes(data[_HEADER.size : position]), origin="JSON")
        for name, dtype, count in fields["columns"]:
            if dtype not in _TYPES or type(count) is not int or count < 0 or name in columns:
                raise ValueError(f"a column {str((name, dtype, count))[:80]}")
            columns[name] = np.frombuffer(data, dtype, count, position)
            size = columns[name].nbytes
            position += size + -size % 8
        keys = memoryview(data)[position:]
        _check(fields, columns, len(keys))
        names = [bytes.fromhex(name) for name in fields["names"]]
        if len(set(names)) != len(names):
            raise ValueError("names of parts occur twice")
        if verify:
            _check_contents(fields, columns, len(keys))
        fields["names"] = tuple(name.decode("utf-8", "surrogateescape") for name in names)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{origin}: is damaged: {error}; {AGAIN}") from error
    return fields, columns, keys


def map_part_table(path: str | os.PathLike[str]) -> memoryview | bytes:
    """Map the file of a part table into memory, or read it if it is small.

    Raises:
        FileNotFoundError: If there is none.
        TruncatedError: If it is empty.
    """
    descriptor = open_descriptor(path)
    try:
        head = os.read(descriptor, SMALL_TABLE_BYTES)
    finally:
        os.close(descriptor)
    if not head:
        raise TruncatedError(f"{path}: is empty, not a part table; {AGAIN}")
    return head if len(head) < SMALL_TABLE_BYTES else map_file(path)


def has_other_version(data: Any) -> bool:
    """Return whether a buffer begins like a part table of an earlier or later release."""
    magic = bytes(data[: len(TABLE_MAGIC)])
    return magic.startswith(_FAMILY) and magic != TABLE_MAGIC


def _check(fields: Mapping[str, Any], columns: Mapping[str, Column], key_bytes: int) -> None:
    """Raise ValueError unless every required column exists and has the right length."""
    if missing := FIELDS.keys() - fields.keys():
        raise ValueError(f"{', '.join(sorted(missing))} missing")
    numbers = [fields[name] for name in ("samples", "parts", "shard_size")]
    samples, parts, _ = _numbers(numbers, _MAX_NUMBER)
    if type(fields["shard_mtime_ns"]) is not int or type(fields["unique"]) is not bool:
        raise ValueError("expected a date in nanoseconds, and whether keys are unique")
    if samples > parts:
        raise ValueError(f"{samples} samples of {parts} parts, expected one part of each at least")
    expected = {"part_block": parts, "part_size": parts}
    if fields["header"] is None:
        expected["sample_block"] = samples + 1
    elif len(_numbers(fields["header"], _MAX_BLOCK)) != 2:
        raise ValueError(f"header {fields['header']!r}, expected two numbers of blocks")
    if fields["schema"] is None:
        expected |= {"first_part": samples + 1, "part_name": parts}
    elif len(_numbers(fields["schema"], len(fields["names"]) - 1)) * samples != parts:
        raise ValueError(f"{parts} parts of {samples} samples with {len(fields['schema'])} each")
    if fields["key_length"] is None:
        expected["key_start"] = samples + 1
    elif _numbers([fields["key_length"]], _MAX_NUMBER)[0] * samples != key_bytes:
        raise ValueError(f"{key_bytes} bytes of keys")
    optional = {"key_order": samples, "part_crc32": parts}
    expected |= {name: length for name, length in optional.items() if name in columns}
    for name, length in expected.items():
        column = columns.get(name)
        if column is None or len(column) != length or column.dtype.kind != "u":
            raise ValueError(f"expected a column {name!r} of {length} numbers")


def _check_contents(fields: Mapping[str, Any], columns: Mapping[str, Column], keys: int) -> None:
    """Raise ValueError if offsets or indices in columns are out of range, or parts of order."""
    samples, parts, size = fields["samples"], fields["parts"], fields["shard_size"]
    block, sizes = columns["part_block"], columns["part_size"]
    # Bounds first: sums of numbers below them do not overflow.
    if _largest(block) > _MAX_BLOCK or _largest(sizes) > size:
        raise ValueError("parts are beyond the end of the shard")
    starts = block.astype(np.int64) * BLOCK
    ends = starts + sizes.astype(np.int64)
    # Readers cut parts that lie side by side out of one read.
    if (ends[:-1] > starts[1:]).any():
        raise ValueError("parts overlap, or are not in the order of the shard")
    if parts and ends[-1] > size:
        raise ValueError("parts are beyond the end of the shard")
    if fields["header"] is None:
        _check_edges("sample_block", columns, size // BLOCK, strict=True)
    if fields["schema"] is None:
        _check_edges("first_part", columns, parts, strict=True)
        if columns["first_part"][0] != 0 or columns["first_part"][-1] != parts:
            raise ValueError("there are parts of no sample")
        if _largest(columns["part_name"]) >= max(1, len(fields["names"])):
            raise ValueError("parts have names that do not exist")
    if samples:
        _check_extents(fields, columns, starts, ends)
    if fields["key_length"] is None:
        _check_edges("key_start", columns, keys, strict=False)
    order = columns.get("key_order")
    if order is not None and (
        _largest(order) >= samples or (np.bincount(order, minlength=samples) != 1).any()
    ):
        raise ValueError("key_order is not an order of the samples")


def _check_extents(
    fields: Mapping[str, Any], columns: Mapping[str, Column], starts: Column, ends: Column
) -> None:
    """Raise ValueError unless parts, which are in file order, lie within their samples."""
    if fields["schema"] is None:
        first = columns["first_part"].astype(np.int64)
        begins, stops = starts[first[:-1]], ends[first[1:] - 1]
    else:
        count = len(fields["schema"])
        begins, stops = starts[::count], ends[count - 1 :: count]
    if fields["header"] is None:
        edges = columns["sample_block"].astype(np.int64) * BLOCK
        is_outside = (begins < edges[:-1]).any() or (stops > edges[1:]).any()
    else:
        gap, end = (blocks * BLOCK for blocks in fields["header"])
        if gap > begins[0] or end > fields["shard_size"]:
            raise ValueError("samples are beyond the edges of the shard")
        is_outside = (stops[:-1] > begins[1:] - gap).any() or stops[-1] > end
    if is_outside:
        raise ValueError("parts are outside of their samples")


def _check_edges(name: str, columns: Mapping[str, Column], limit: int, *, strict: bool) -> None:
    column = columns[name]
    low, high = column[:-1], column[1:]
    if _largest(column) > limit or not (high > low if strict else high >= low).all():
        raise ValueError(f"numbers in {name!r} do not ascend to {limit} at most")


def _largest(column: Column) -> int:
    return int(np.maximum.reduce(column, initial=0))  # `max` takes twice as long


def _numbers(values: Any, largest: int) -> list[int]:
    """Return values as integers from 0 to `largest`, or raise ValueError."""
    if not isinstance(values, list) or not values:
        raise ValueError(f"expected a list of numbers, found {str(values)[:80]!r}")
    for value in values:
        if type(value) is not int or not 0 <= value <= largest:
            raise ValueError(f"expected an integer from 0 to {largest}, found {str(value)[:80]!r}")
    return values


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)
