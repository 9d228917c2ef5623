"""Arrays in the tenbin format, as bytes and as files."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from energon.decode.tenbin import decode_tenbin, encode_tenbin
from energon.errors import ConfigError

Arrays = list[NDArray[Any]]


def encode_buffer(l: Arrays, infos: Any = None) -> bytes:  # noqa: E741
    """Return arrays as bytes."""
    return encode_tenbin([np.asarray(array) for array in l])


def decode_buffer(buf: bytes, infos: Any = False) -> Arrays:
    """Return the arrays in some bytes, as views that cannot be written to."""
    return decode_tenbin(bytes(buf))


def write(stream: BinaryIO, l: Arrays, infos: Any = None) -> None:  # noqa: E741
    """Write arrays to a stream."""
    stream.write(encode_buffer(l))


def read(stream: BinaryIO, n: int | None = None, infos: Any = False) -> Arrays:
    """Return the arrays of a stream, or the first `n` of them."""
    return decode_buffer(stream.read())[:n]


def save(fname: str | os.PathLike[str], *args: NDArray[Any], nocheck: bool = False) -> None:
    """Write arrays to a file, whose name ends in `.ten`."""
    _check(fname, nocheck)
    with open(fname, "wb") as stream:
        write(stream, list(args))


def load(fname: str | os.PathLike[str], infos: Any = False, nocheck: bool = False) -> Arrays:
    """Return the arrays of a file, whose name ends in `.ten`."""
    _check(fname, nocheck)
    with open(fname, "rb") as stream:
        return read(stream)


def _check(fname: str | os.PathLike[str], nocheck: bool) -> None:
    if not nocheck and not os.fspath(fname).endswith(".ten"):
        raise ConfigError(f"{fname}: wanted is a name that ends in .ten, or nocheck=True")
