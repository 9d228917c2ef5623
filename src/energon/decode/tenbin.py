"""The array format of webdataset's `.ten` and `.tb` parts.

A sequence of chunks: magic `~TenBin~`, length as little-endian int64, content padded to 64
bytes. Each array is a header chunk (dtype code in 8 bytes, 8 bytes of information, number of
dimensions and dimensions as int64) and a chunk of content.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import DecodeError

TENBIN_MAGIC = b"~TenBin~"
DTYPES = {
    **{f"f{size}": f"<f{size}" for size in (2, 4, 8)},
    **{f"{kind}{size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)},
}
MAX_DIMENSIONS = 10
_INFO_BYTES = 8


def decode_tenbin(data: bytes) -> list[NDArray[Any]]:
    """Return the arrays in `data` as read-only views.

    Raises:
        DecodeError: If the data are damaged or truncated.
    """
    return [array for array, _ in decode_tenbin_infos(data)]


def decode_tenbin_infos(data: bytes) -> list[tuple[NDArray[Any], str]]:
    """Return the arrays in `data`, each with the information in its header.

    Raises:
        DecodeError: If the data are damaged or cut off.
    """
    chunks = split_chunks(data)
    if len(chunks) % 2:
        raise DecodeError(f"tenbin data end after {len(chunks)} chunks, before an array")
    return [
        _array(header, content) for header, content in zip(chunks[::2], chunks[1::2], strict=True)
    ]


def encode_tenbin(arrays: list[NDArray[Any]], infos: Sequence[str] = ()) -> bytes:
    """Return `arrays` as tenbin data.

    Args:
        arrays: What to write.
        infos: A short text for the header of each, or nothing.

    Raises:
        ValueError: If the format has no such type, or a text is not of up to 8 ASCII letters.
    """
    texts = infos or [""] * len(arrays)
    return b"".join(
        frame_chunk(part)
        for array, text in zip(arrays, texts, strict=True)
        for part in array_parts(array, text)
    )


def split_chunks(data: bytes) -> list[memoryview]:
    """Return the chunks in `data`, as views of it.

    Raises:
        DecodeError: If the data are damaged or cut off.
    """
    found, at = [], 0
    while at < len(data):
        if data[at : at + 8] != TENBIN_MAGIC or len(data) < at + 16:
            raise DecodeError(f"tenbin data have no chunk at byte {at} of {len(data)}")
        (length,) = struct.unpack_from("<q", data, at + 8)
        if not 0 <= length <= len(data) - at - 16:
            raise DecodeError(
                f"tenbin chunk at byte {at} has {length} bytes, {len(data) - at - 16} are left"
            )
        found.append(memoryview(data)[at + 16 : at + 16 + length])
        at += 16 + length + -length % 64
    return found


def array_header(header: memoryview) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    """Return shape, type and text that a header describes.

    Raises:
        DecodeError: If it describes no array.
    """
    if len(header) < 24:
        raise DecodeError(f"tenbin header {bytes(header)!r} is too short")
    code = bytes(header[:8]).strip(b"\0 ").decode("ascii", "replace")
    sizes = struct.unpack(f"<{len(header) // 8 - 2}q", header[16 : len(header) // 8 * 8])
    if code not in DTYPES or not sizes or len(sizes) != sizes[0] + 1 or sizes[0] > MAX_DIMENSIONS:
        raise DecodeError(f"tenbin header {bytes(header)!r} describes no array")
    info = bytes(header[8:16]).strip(b"\0").decode("ascii", "replace")
    return sizes[1:], np.dtype(DTYPES[code]), info


def _array(header: memoryview, content: memoryview) -> tuple[NDArray[Any], str]:
    shape, dtype, info = array_header(header)
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or expected != len(content):
        raise DecodeError(f"tenbin array {dtype}{shape} needs {expected} bytes, has {len(content)}")
    return np.frombuffer(content, dtype).reshape(shape), info


def array_parts(array: NDArray[Any], info: str) -> tuple[bytes, bytes]:
    """Return header and content of an array.

    Raises:
        ValueError: If the format has no such type, or the text is not of up to 8 ASCII letters.
    """
    code = array.dtype.str.lstrip("<>|=")
    if code not in DTYPES or array.ndim >= MAX_DIMENSIONS:
        raise ValueError(f"tenbin has no arrays of {array.dtype} with {array.ndim} dimensions")
    if not info.isascii() or len(info) > _INFO_BYTES:
        raise ValueError(f"{info!r}: expected a text of up to {_INFO_BYTES} ASCII letters")
    header = code.encode().ljust(8, b"\0") + info.encode().ljust(_INFO_BYTES, b"\0")
    header += struct.pack(f"<{array.ndim + 1}q", array.ndim, *array.shape)
    return header, np.ascontiguousarray(array).astype(DTYPES[code], copy=False).tobytes()


def frame_chunk(content: bytes) -> bytes:
    """Return a chunk with that content."""
    return TENBIN_MAGIC + struct.pack("<q", len(content)) + content + bytes(-len(content) % 64)
