"""Chunks of records, as MosaicML Streaming and LitData write them.

A chunk begins with its number of records N and N + 1 offsets, little-endian 32-bit numbers; a
record with the sizes of its fields, where these differ, followed by their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from energon.errors import FormatError
from energon.extra import needs_extra
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.io.files import read_document
from energon.prepare.files import reporting
from energon.utf8 import decode_utf8

NAME = "index.json"


def read_json_index(folder: AnyPath) -> Any:
    """Return what the index of a folder says.

    Raises:
        FormatError: If it is not JSON.
        StorageError: If it cannot be read.
    """
    path = folder / NAME
    with reporting(path):
        text = decode_utf8(read_document(path), origin=str(path))
    return parse_json(text, origin=str(path), hint="copy the folder again, or write it again")


def read_chunk(path: AnyPath, *, compression: str | None) -> bytes:
    """Return the content of a chunk, unpacked.

    Raises:
        FormatError: If it is packed in an unknown way, or damaged.
        DatasetNotFoundError: If it is missing.
    """
    with reporting(path):
        data = path.read_bytes()
    if not compression:
        return data
    return unpack(data, path, compression)


def unpack(data: bytes | memoryview, path: AnyPath, compression: str) -> bytes:
    """Return what was compressed.

    Raises:
        FormatError: If it is packed in an unknown way, or damaged.
        MissingExtraError: If zstandard is not installed.
    """
    name = compression.partition(":")[0]
    if name not in ("zstd", "zstandard"):
        raise FormatError(f"{path}: is packed with {compression!r}; only zstd is known here")
    with needs_extra("formats", f"{path}: zst needs zstandard"):
        import zstandard
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise FormatError(f"{path}: {error}") from error


def records(data: bytes, origin: object, start: int = 0) -> Iterator[memoryview]:
    """Yield the records of a chunk from number `start` on.

    Raises:
        FormatError: If its offsets make no sense.
    """
    count = int.from_bytes(data[:4], "little")
    if len(data) < 4 * (count + 2):
        raise FormatError(f"{origin}: {count} records do not fit into {len(data)} bytes")
    edges = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
    if (np.diff(edges) < 0).any() or edges[-1] > len(data):
        raise FormatError(f"{origin}: its offsets do not ascend, or lead beyond its end")
    view = memoryview(data)
    for number in range(start, count):
        yield view[edges[number] : edges[number + 1]]


def fields(record: memoryview, sizes: Sequence[int | None], origin: object) -> list[bytes]:
    """Return the contents of the fields of a record.

    Args:
        record: The record.
        sizes: Bytes of each field; None for those whose size is in the record.
        origin: What messages call the chunk.

    Raises:
        FormatError: If the sizes do not add up to the record.
    """
    count = sum(size is None for size in sizes)
    stated = iter(np.frombuffer(record, "<u4", count).tolist() if count else [])
    position = 4 * count
    contents = []
    for size in sizes:
        length = next(stated) if size is None else size
        contents.append(bytes(record[position : position + length]))
        position += length
    if position != len(record):
        raise FormatError(f"{origin}: a record has {len(record)} bytes, its fields {position}")
    return contents


def stored_picture(content: bytes) -> Any:
    """Return a picture that was stored as three numbers, its mode and its pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(content, "<u4", 3).tolist()
    mode = content[12 : 12 + length].decode()
    return Image.frombytes(mode, (width, height), content[12 + length :])
