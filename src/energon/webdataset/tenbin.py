"""Arrays in the tenbin format, as bytes and as files. Each can have a text of up to 8 letters."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.decode.tenbin import MAGIC, decode_tenbin_infos, encode_tenbin
from energon.errors import ConfigError, DecodeError

Arrays = list[NDArray[Any]]

_PIECE_BYTES = 1 << 20


def encode_buffer(l: Arrays, infos: Sequence[str] | None = None) -> bytes:  # noqa: E741
    """Return arrays as bytes; `infos` has a text for each."""
    if infos is not None and len(infos) != len(l):
        raise ConfigError(f"there are {len(l)} arrays, and infos for {len(infos)}")
    return encode_tenbin([np.asarray(array) for array in l], infos or ())


def decode_buffer(buf: bytes, infos: bool | Sequence[str] | None = False) -> Any:
    """Return the arrays in some bytes, as views that cannot be written to.

    Args:
        buf: The bytes.
        infos: True for a pair of the arrays and their texts; a list of texts if they must be
            these.

    Raises:
        DecodeError: If the bytes are damaged, or the texts are others.
    """
    pairs = decode_tenbin_infos(bytes(buf))
    arrays, found = [array for array, _ in pairs], [info for _, info in pairs]
    if infos is True:
        return arrays, found
    if infos and list(infos) != found:
        raise DecodeError(f"the texts of the arrays are {found}, expected {list(infos)}")
    return arrays


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
    if len(start) < 16 or not start.startswith(MAGIC):
        return start
    (length,) = struct.unpack_from("<q", start, 8)
    left = max(0, length + -length % 64)
    parts = [start]
    # In pieces: streams take memory for what they are asked for, whether it is there or not.
    while left > 0 and (part := stream.read(min(left, _PIECE_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _check(fname: str | os.PathLike[str], nocheck: bool) -> None:
    if not nocheck and not os.fspath(fname).endswith(".ten"):
        raise ConfigError(f"{fname}: expected a name that ends in .ten, or nocheck=True")
