"""Streams and files of Arrow: their record batches, within the limit of what they unpack to.

The buffers of a record batch may be compressed. Each then begins with the number of its bytes
without compression (64-bit, little-endian; -1 for one that is stored as it is), and pyarrow takes
that much memory. Where the buffers are is in the metadata of the message, a FlatBuffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from energon.errors import FormatError
from energon.limits import DECODED_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

_FILE = b"ARROW1\0\0"
_HEADER_TYPE, _HEADER = 1, 2
_DICTIONARY_BATCH, _DICTIONARY_DATA = 2, 1
_BUFFERS, _COMPRESSION = 2, 3
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_FILE_END = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")
_BUFFER = struct.Struct("<qq")
_SIZE = struct.Struct("<q")


def read_batches(data: pa.Buffer, *, origin: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the columns and the record batches of a stream or file, views if not compressed.

    Raises:
        FormatError: If compressed batches have more than `DECODED_BYTES`.
        pyarrow.ArrowException: If it is damaged; also OSError or ValueError.
    """
    import pyarrow as pa

    is_file = bytes(data[: len(_FILE)]) == _FILE
    size = 0
    for metadata, body in _blocks(data) if is_file else _messages(data):
        size += _unpacked_bytes(metadata, body)
        if size > DECODED_BYTES.value:
            raise FormatError(
                f"{origin}: unpacks to {size} bytes or more, more than {DECODED_BYTES.value}; "
                f"{DECODED_BYTES.hint}"
            )
    if is_file:
        file = pa.ipc.open_file(data)
        schema = file.schema
        batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    else:
        stream = pa.ipc.open_stream(data)
        schema, batches = stream.schema, list(stream)
    for batch in batches:
        batch.validate()
    return schema, batches


def _messages(data: pa.Buffer) -> Iterator[tuple[bytes, pa.Buffer]]:
    """Yield the metadata and bodies of the batches of a stream."""
    import pyarrow as pa

    for message in pa.ipc.MessageReader.open_stream(data):
        if message.body is not None:
            yield bytes(message.metadata), message.body


def _blocks(data: pa.Buffer) -> Iterator[tuple[bytes, pa.Buffer]]:
    """Yield the metadata and bodies of the batches that the footer of a file lists.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        end = len(data) - _FILE_END.size
        length, magic = _FILE_END.unpack(data[end:])
        if magic != _FILE[: len(magic)] or not 0 < length <= end:
            raise ValueError(f"the file ends with {magic!r}")
        footer = bytes(data[end - length : end])
        root = struct.unpack_from("<I", footer)[0]
        for number in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES):
            vector = _table(footer, root, number)
            count = struct.unpack_from("<I", footer, vector)[0] if vector else 0
            for at in range(count):
                start, head, size = _BLOCK.unpack_from(footer, vector + 4 + at * _BLOCK.size)
                body = start + head
                if not (0 <= start <= body <= body + size <= end):
                    raise ValueError("a record batch is outside the file")
                # Before version 0.15 there were only the four bytes of the length.
                prefix = 8 if bytes(data[start : start + 4]) == b"\xff" * 4 else 4
                yield bytes(data[start + prefix : body]), data[body : body + size]
    except struct.error as error:
        raise ValueError(f"the footer is damaged: {error}") from error


def _unpacked_bytes(metadata: bytes, body: pa.Buffer) -> int:
    """Return the bytes of the buffers of a message without compression; 0 if they have none.

    Raises:
        ValueError: If the metadata are damaged.
    """
    try:
        message = struct.unpack_from("<I", metadata)[0]
        batch = _table(metadata, message, _HEADER)
        kind = _field(metadata, message, _HEADER_TYPE)
        if batch and kind and metadata[kind] == _DICTIONARY_BATCH:
            batch = _table(metadata, batch, _DICTIONARY_DATA)
        if not batch or not _field(metadata, batch, _COMPRESSION):
            return 0
        size, vector = 0, _table(metadata, batch, _BUFFERS)
        count = struct.unpack_from("<I", metadata, vector)[0] if vector else 0
        for number in range(count):
            start, length = _BUFFER.unpack_from(metadata, vector + 4 + number * _BUFFER.size)
            if length >= _SIZE.size and 0 <= start <= len(body) - _SIZE.size:
                size += max(0, _SIZE.unpack(body[start : start + _SIZE.size])[0])
    except (struct.error, IndexError) as error:
        raise ValueError(f"the metadata of a record batch are damaged: {error}") from error
    return size


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a FlatBuffer's table is; 0 if it is missing."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset: int = struct.unpack_from("<H", data, fields + 4 + 2 * number)[0]
    return table + offset if offset else 0


def _table(data: bytes, table: int, number: int) -> int:
    """Return where the table or vector is to which a field refers; 0 if it is missing."""
    at = _field(data, table, number)
    return at + int(struct.unpack_from("<I", data, at)[0]) if at else 0
