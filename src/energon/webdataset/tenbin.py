"""Arrays in the tenbin format, as bytes and files. Each may have a label of up to 8 characters."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.decode.values import (
    DTYPES,
    TENBIN_MAGIC,
    array_header,
    array_parts,
    decode_tenbin_infos,
    frame_chunk,
    split_chunks,
)
from energon.errors import ConfigError, DecodeError

Arrays = list[NDArray[Any]]

_PIECE_BYTES = 1 << 20


magic_str = TENBIN_MAGIC.decode()
magic = struct.unpack("@q", TENBIN_MAGIC)[0]
magic_bytes = TENBIN_MAGIC

long_to_short = {np.dtype(code).name: name for name, code in DTYPES.items()}
"""Codes of the types of arrays, by their names in NumPy."""
short_to_long = {code: name for name, code in long_to_short.items()}


def bytelen(a: Any) -> int:
    """Return the length of an array or of bytes, in bytes."""
    return int(a.nbytes) if hasattr(a, "nbytes") else len(bytedata(a))


def bytedata(a: Any) -> Any:
    """Return the bytes of an array, or bytes as they are."""
    if isinstance(a, bytes | bytearray | memoryview):
        return a
    if not hasattr(a, "data"):
        raise ConfigError(f"{type(a).__name__}: expected an array or bytes")
    return a.data


def str64(s: str) -> int:
    """Return a label of up to 8 characters as a number."""
    return int(struct.unpack("@q", s.encode("ascii").ljust(8, b"\0"))[0])


def unstr64(i: int) -> str:
    """Return the label that a number encodes."""
    return struct.pack("@q", i).decode("ascii").strip("\0")


def roundup(n: int, k: int = 64) -> int:
    """Return the next multiple of `k`."""
    return n + -n % k


def check_acceptable_input_type(data: Arrays, allow64: bool) -> None:
    """Raise ConfigError for arrays of a type that the format lacks, or of 64 bits."""
    for array in data:
        if array.dtype.name not in long_to_short:
            raise ConfigError(f"tenbin has no arrays of {array.dtype}")
        if not allow64 and array.dtype.itemsize == 8:
            raise ConfigError(f"arrays of {array.dtype} have to be allowed: allow64=True")


def check_infos(data: Any, infos: Sequence[str], required_infos: Any = None) -> Any:
    """Check the labels of arrays, and return the arrays, with their labels if `infos` is True.

    Raises:
        DecodeError: If the labels differ from those required.
    """
    if required_infos is True:
        return data, infos
    if required_infos and list(required_infos) != list(infos):
        raise DecodeError(f"the texts of the arrays are {infos}, expected {list(required_infos)}")
    return data


def encode_header(a: NDArray[Any], info: str = "") -> bytes:
    """Return the header of an array."""
    return array_parts(a, info)[0]


def decode_header(h: Any) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    """Return shape, type and label of an array.

    Raises:
        DecodeError: If the header is invalid.
    """
    return array_header(memoryview(h))


def encode_list(l: Arrays, infos: Sequence[str] | None = None) -> list[bytes]:  # noqa: E741
    """Return arrays as chunks: a header and the content of each."""
    if infos is not None and len(infos) != len(l):
        raise ConfigError(f"there are {len(l)} arrays, and infos for {len(infos)}")
    return [
        part
        for array, info in zip(l, infos or [""] * len(l), strict=True)
        for part in array_parts(np.asarray(array), info)
    ]


def decode_list(l: Sequence[Any], infos: Any = False) -> Any:  # noqa: E741
    """Return the arrays of chunks, see `decode_buffer`."""
    return decode_buffer(encode_chunks(l), infos)


def encode_chunks(l: Sequence[Any]) -> bytes:  # noqa: E741
    """Return chunks as bytes, with the framing of each."""
    return b"".join(map(frame_chunk, map(bytes, l)))


def decode_chunks(buf: Any) -> list[Any]:
    """Return the chunks in some bytes.

    Raises:
        DecodeError: If the bytes are damaged.
    """
    return [bytes(chunk) for chunk in split_chunks(bytes(buf))]


def write_chunk(stream: BinaryIO, buf: Any) -> None:
    """Write a chunk to a stream."""
    stream.write(frame_chunk(bytes(bytedata(buf))))


def read_chunk(stream: BinaryIO) -> bytes | None:
    """Return the next chunk of a stream, or None at its end.

    Raises:
        DecodeError: If there is no valid chunk.
    """
    data = _chunk(stream)
    return bytes(split_chunks(data)[0]) if data else None


def encode_buffer(l: Arrays, infos: Sequence[str] | None = None) -> bytes:  # noqa: E741
    """Return arrays as bytes; `infos` has a label for each."""
    return encode_chunks(encode_list(l, infos))


def decode_buffer(buf: bytes, infos: bool | Sequence[str] | None = False) -> Any:
    """Return the arrays in some bytes, as read-only views.

    Args:
        buf: The bytes.
        infos: True to return a pair of the arrays and their labels; a list of required labels.

    Raises:
        DecodeError: If the bytes are damaged, or the labels differ from those required.
    """
    pairs = decode_tenbin_infos(bytes(buf))
    return check_infos([array for array, _ in pairs], [info for _, info in pairs], infos)


def write(stream: BinaryIO, l: Arrays, infos: Sequence[str] | None = None) -> None:  # noqa: E741
    """Write arrays to a stream."""
    stream.write(encode_buffer(l, infos))


def read(stream: BinaryIO, n: int | None = None, infos: bool | Sequence[str] | None = False) -> Any:
    """Return the arrays of a stream, or the next `n` of them; see `decode_buffer`."""
    data = stream.read() if n is None else b"".join(_chunk(stream) for _ in range(2 * n))
    return decode_buffer(data, infos)


def save(
    fname: str | os.PathLike[str],
    *args: NDArray[Any],
    infos: Sequence[str] | None = None,
    nocheck: bool = False,
) -> None:
    """Write arrays to a file, whose name ends in `.ten`."""
    _check(fname, nocheck)
    with open(fname, "wb") as stream:
        write(stream, list(args), infos)


def load(
    fname: str | os.PathLike[str],
    infos: bool | Sequence[str] | None = False,
    nocheck: bool = False,
) -> Any:
    """Return the arrays of a file, whose name ends in `.ten`; see `decode_buffer`."""
    _check(fname, nocheck)
    with open(fname, "rb") as stream:
        return read(stream, infos=infos)


def _chunk(stream: BinaryIO) -> bytes:
    start = stream.read(16)
    if len(start) < 16 or not start.startswith(TENBIN_MAGIC):
        return start
    (length,) = struct.unpack_from("<q", start, 8)
    left = max(0, length + -length % 64)
    parts = [start]
    # In pieces: streams allocate the requested size, even if the data is shorter.
    while left > 0 and (part := stream.read(min(left, _PIECE_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _check(fname: str | os.PathLike[str], nocheck: bool) -> None:
    if not nocheck and not os.fspath(fname).endswith(".ten"):
        raise ConfigError(f"{fname}: expected a name that ends in .ten, or nocheck=True")
