"""The items of chunks of LitData, which are compressed as a whole, in frames, or one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from energon.errors import FormatError
from energon.io.epath import AnyPath
from energon.prepare.importers.chunks import read_chunk, records, unpack

_MAGIC = b"LDFZ01\0\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_VERSION = 1


def litdata_items(
    path: AnyPath, *, compression: str | None, level: str | None, start: int
) -> Iterator[memoryview]:
    """Yield the items of a chunk from number `start` on.

    Args:
        path: The chunk.
        compression: Name of the method; None for none.
        level: "chunk" or None if the whole file is compressed, "batch" for frames of items,
            "sample" for items.
        start: Number of the first item.

    Raises:
        FormatError: If the chunk is damaged.
    """
    if level == "batch":
        yield from _of_frames(path, compression or "zstd", start)
        return
    whole = compression if level in (None, "", "chunk") else None
    for record in records(read_chunk(path, compression=whole), path, start):
        if compression and level == "sample":
            yield memoryview(unpack(record, path, compression))
        else:
            yield record


def _of_frames(path: AnyPath, compression: str, start: int) -> Iterator[memoryview]:
    data = read_chunk(path, compression=None)
    try:
        magic, version, _, num_items, _, num_frames = _HEAD.unpack_from(data)
        edges = np.frombuffer(data, "<u4", num_items + 1, _HEAD.size).astype(np.int64)
        position = _HEAD.size + 4 * (num_items + 1)
        frames = [
            _FRAME.unpack_from(data, position + number * _FRAME.size)
            for number in range(num_frames)
        ]
    except (struct.error, ValueError) as error:
        raise FormatError(f"{path}: is cut off: {error}") from error
    if (magic, version) != (_MAGIC, _VERSION):
        raise FormatError(f"{path}: begins with {data[:10]!r}, wanted {_MAGIC!r}, version 1")
    for first, count, offset, packed, size in frames:
        if first + count <= start:
            continue
        content = memoryview(unpack(data[offset : offset + packed], path, compression))
        if len(content) != size or edges[first + count] - edges[first] != size:
            raise FormatError(f"{path}: items {first} to {first + count} have not {size} bytes")
        for number in range(max(first, start), first + count):
            begin, end = (edges[number : number + 2] - edges[first]).tolist()
            yield content[begin:end]
