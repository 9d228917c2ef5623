"""Arrays and tensors from their files, whose headers may claim any size: npy, npz, pth.

What a header claims is compared with what is there before memory is taken for it.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from energon.decode.bounds import check_limit
from energon.errors import DecodeError
from energon.limits import DECODED_BYTES, UNPACKED_BYTES

_KNOWN_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_NAME = "data.pkl"


def decode_npy(data: bytes) -> Any:
    """Return the array in an npy file.

    Raises:
        ValueError: If it is none.
        DecodeError: If less is there than its header says, or it holds pickled objects.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise DecodeError("the array holds pickled objects, which are not unpickled")
    content = memoryview(data)[stream.tell() :]
    expected = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or len(content) < expected:
        raise DecodeError(f"the array needs {expected} bytes, {len(content)} are there")
    array = np.frombuffer(content[:expected], dtype)
    return array.reshape(shape, order="F" if fortran else "C").copy()


def decode_npz(data: bytes) -> dict[str, Any]:
    """Return the arrays in an npz file by name.

    Raises:
        ValueError: If it is none.
        DecodeError: If it unpacks to more than `UNPACKED_BYTES`.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_archive(archive, data)
        found = {}
        for entry in archive.infolist():
            content = archive.read(entry)
            is_array = content.startswith(np.lib.format.MAGIC_PREFIX)
            name = entry.filename.removesuffix(".npy")
            found[name] = decode_npy(content) if is_array else content
        return found


def decode_pth(data: bytes, *, trusted: bool) -> Any:
    """Return what `torch.save` has written, on the CPU.

    Args:
        data: The file.
        trusted: Whether it may hold more than tensors, and run code.

    Raises:
        pickle.UnpicklingError: If it holds more than tensors, and is not trusted.
        DecodeError: If it takes more memory than the limits allow.
    """
    import torch

    _check_pth(data, trusted)
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    if not trusted:
        # A tensor may claim to be larger than its storage, by strides of 0.
        total = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
        check_limit(total, DECODED_BYTES, f"its tensors have {total} bytes")
    return value


def _check_archive(archive: zipfile.ZipFile, data: bytes) -> None:
    """Raise DecodeError if the entries of a zip file are together larger than they may be."""
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if total > len(data):
        check_limit(total, UNPACKED_BYTES, f"the archive unpacks to {total} bytes")
    for entry in entries:
        if entry.compress_type not in _KNOWN_COMPRESSIONS:
            # Some of these take memory as the archive says.
            raise DecodeError(
                f"{entry.filename!r} in the archive is compressed in a way ({entry.compress_type})"
                " that is not known for this format"
            )


def _check_pth(data: bytes, trusted: bool) -> None:
    if not data.startswith(_ZIP_MAGIC):
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        _check_archive(archive, data)
        if trusted:
            return
        for entry in archive.infolist():
            # The one type with a constructor that takes memory for a number.
            if entry.filename.endswith(_PICKLE_NAME) and _makes_bytearray(archive.read(entry)):
                raise DecodeError(
                    "it holds a bytearray, which may be of any size; save a tensor of type uint8 "
                    "instead"
                )


def _makes_bytearray(pickled: bytes) -> bool:
    return b"bytearray" in pickled and any(
        code.name == "STACK_GLOBAL" or (code.name == "GLOBAL" and "bytearray" in str(argument))
        for code, argument, _ in pickletools.genops(pickled)
    )


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in lists and dicts, each container once."""
    import torch

    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple | dict | set) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
