"""Decode values: arrays from npy, npz, pth and ten files, and JSON, msgpack and CBOR.

What the header of an array claims is checked against the data before memory is allocated for it;
documents are decoded up to a size and a depth.

`encode_part` is the way back: it turns values into the bytes of parts, by their extension.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from datetime import date, time
from decimal import Decimal
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError, DecodeError, MissingExtraError, needs_extra
from energon.limits import (
    DECODED_BYTES,
    DOCUMENT_BYTES,
    PART_DEPTH,
    UNPACKED_BYTES,
    check_depth,
    check_limit,
    too_deep,
)
from energon.messages import type_in_words

if TYPE_CHECKING:
    from zipfile import ZipFile

_ZIP_MAGIC = b"PK\x03\x04"


def decode_npy(data: bytes) -> Any:
    """Return the array in an npy file.

    Raises:
        ValueError: If it is not an npy file.
        DecodeError: If it has less data than its header claims, or contains pickled objects.
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
        raise DecodeError(f"the array needs {expected} bytes, found {len(content)}")
    array = np.frombuffer(content[:expected], dtype)
    return array.reshape(shape, order="F" if fortran else "C").copy()


def decode_npz(data: bytes) -> dict[str, Any]:
    """Return the arrays in an npz file by name.

    Raises:
        ValueError: If it is not an npz file.
        DecodeError: If it unpacks to more than `UNPACKED_BYTES`.
    """
    with _open_archive(data) as archive:
        arrays = {}
        for entry in archive.infolist():
            content = archive.read(entry)
            is_array = content.startswith(np.lib.format.MAGIC_PREFIX)
            name = entry.filename.removesuffix(".npy")
            arrays[name] = decode_npy(content) if is_array else content
        return arrays


def decode_pth(data: bytes, *, trusted: bool) -> Any:
    """Load what `torch.save` has written, on the CPU.

    Args:
        data: The file.
        trusted: Whether it may contain more than tensors, and run code.

    Raises:
        MissingExtraError: If torch is not installed.
        pickle.UnpicklingError: If it contains more than tensors and is not trusted.
        DecodeError: If it needs more memory than the limits allow.
    """
    with needs_extra("torch", "pth parts need torch"):
        import torch
    if data.startswith(_ZIP_MAGIC):
        _open_archive(data).close()
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    if not trusted:
        # A tensor may claim to be larger than its storage, by strides of 0.
        total = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
        check_limit(total, DECODED_BYTES, f"its tensors have {total} bytes")
    return value


def _open_archive(data: bytes) -> ZipFile:
    """Open a zip file; raise DecodeError if its entries exceed the limit together."""
    import zipfile

    archive = zipfile.ZipFile(io.BytesIO(data))
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    if total > len(data):
        check_limit(total, UNPACKED_BYTES, f"the archive unpacks to {total} bytes")
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Some of these allocate as much memory as the archive tells them to.
            raise DecodeError(
                f"{entry.filename!r} in the archive is compressed by method "
                f"{entry.compress_type}, which this format does not use"
            )
    return archive


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in lists and dicts, each container once.

    Raises:
        DecodeError: If they are nested too deeply.
    """
    import torch

    limit = PART_DEPTH.value
    waiting, seen = [(value, 0)], set()
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple | dict | set) and id(item) not in seen:
            if depth >= limit:
                raise too_deep()
            seen.add(id(item))
            inner = item.values() if isinstance(item, dict) else item
            waiting += [(each, depth + 1) for each in inner]


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
        DecodeError: If the data are damaged or truncated.
    """
    chunks = split_chunks(data)
    if len(chunks) % 2:
        raise DecodeError(f"tenbin data end after {len(chunks)} chunks, before an array")
    return [
        _array(header, content) for header, content in zip(chunks[::2], chunks[1::2], strict=True)
    ]


def encode_tenbin(arrays: list[NDArray[Any]]) -> bytes:
    """Return `arrays` as tenbin data.

    Raises:
        ValueError: If the format has no such type.
    """
    return b"".join(frame_chunk(part) for array in arrays for part in array_parts(array, ""))


def split_chunks(data: bytes) -> list[memoryview]:
    """Return the chunks in `data`, as views of it.

    Raises:
        DecodeError: If the data are damaged or truncated.
    """
    chunks, at = [], 0
    while at < len(data):
        if data[at : at + 8] != TENBIN_MAGIC or len(data) < at + 16:
            raise DecodeError(f"tenbin data have no chunk at byte {at} of {len(data)}")
        (length,) = struct.unpack_from("<q", data, at + 8)
        if not 0 <= length <= len(data) - at - 16:
            raise DecodeError(
                f"tenbin chunk at byte {at} has {length} bytes, {len(data) - at - 16} are left"
            )
        chunks.append(memoryview(data)[at + 16 : at + 16 + length])
        at += 16 + length + -length % 64
    return chunks


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


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def decode_json(data: bytes) -> Any:
    """Return the value that a JSON text describes.

    Raises:
        ValueError: If it is not valid.
        DecodeError: If it is larger than `DOCUMENT_BYTES` or deeper than `PART_DEPTH`.
    """
    size, depth = len(data), PART_DEPTH.value
    if size > DOCUMENT_BYTES.value:
        _check_size(data)
    # A level takes a byte, and most texts have few brackets: only in others is it worth finding out
    # how deep they are.
    if size > depth and data.count(b"[") + data.count(b"{") > depth < _json_depth(data):
        raise too_deep()
    return json_parser()(data)


@cache
def json_parser() -> Callable[[bytes], Any]:
    """Return the fastest function that does what `json.loads` does.

    msgspec takes a third of the time. It gives the same values, or refuses: infinite numbers and
    NaN, halves of surrogate pairs, other encodings than UTF-8, and what is not JSON.
    """
    try:
        import msgspec
    except ImportError:
        return json.loads
    decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode

    def parse(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:
            return json.loads(data)

    return parse


def decode_msgpack(data: bytes) -> Any:
    """Return a value from its bytes in msgpack, see `decode_json`."""
    with needs_extra("formats", "msgpack parts need msgpack"):
        import msgpack
    _check_size(data)
    value = msgpack.unpackb(data)
    # Each level takes a byte.
    if len(data) > PART_DEPTH.value and isinstance(value, list | dict):
        check_depth(value)
    return value


def decode_cbor(data: bytes) -> Any:
    """Return a value from its bytes in CBOR, see `decode_json`."""
    with needs_extra("formats", "cbor parts need cbor2"):
        import cbor2
    _check_size(data)
    try:
        return cbor2.loads(data, max_depth=PART_DEPTH.value)
    except cbor2.CBORDecodeError as error:
        if "nesting depth" in str(error):
            raise too_deep() from error
        raise


def _check_size(data: bytes) -> None:
    if len(data) > DOCUMENT_BYTES.value:
        check_limit(len(data), DOCUMENT_BYTES, f"the part has {len(data)} bytes")


def _json_depth(data: bytes) -> int:
    """Return how deep a JSON text is nested, at most: damaged ones have no depth."""
    if _deepest(data) <= PART_DEPTH.value:
        return 0
    # Brackets in strings do not count. They are looked for now only, as that takes time.
    text = data.decode(json.detect_encoding(data), "surrogatepass").encode("utf-8", "surrogatepass")
    return _deepest(_STRING.sub(b"", text))


def _deepest(text: bytes) -> int:
    codes = np.frombuffer(text, np.uint8)
    opened, closed = (np.isin(codes, list(each)).view(np.int8) for each in (b"[{", b"]}"))
    steps = (opened - closed)[opened != closed]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


Content = bytes | Path
"""The content of a part: bytes, or a file that is copied without holding it in memory."""

_JPEG_QUALITY = 95


def encode_part(part: str, value: Any) -> Content:
    """Return the content of a part.

    Bytes are written as they are, str as UTF-8, and paths stand for the content of a file. Other
    values are encoded by the last extension of the part: json and jsn; numbers as cls, cls2, index,
    inx, id and count; arrays as npy, npz (a dict of them), ten and tb; images (PIL, or uint8
    arrays) as jpg, jpeg, png, webp, ppm, pgm, pbm, bmp and tiff; mp, msg and cbor; pyd, pickle and
    pth. With an additional extension gz, the content is compressed.

    Raises:
        ConfigError: If a value of this type cannot be written under this name.
        MissingExtraError: If a package is not installed.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, PathLike):
        return Path(value)
    stem, _, extension = part.lower().rpartition(".")
    if extension == "gz" and stem:
        inner = encode_part(stem, value)
        content = inner.read_bytes() if isinstance(inner, Path) else inner
        import gzip

        return gzip.compress(content, mtime=0)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    encode = _ENCODERS.get(extension)
    if encode is None:
        raise ConfigError(
            f"part {part!r} is {type_in_words(value)}, but the extension {extension!r} does not "
            "say how to write it; pass bytes, str or a path, or choose one of "
            f"{', '.join(sorted(_ENCODERS))}"
        )
    try:
        return encode(value)
    except MissingExtraError:
        raise  # nothing is wrong with the value
    except (TypeError, ValueError, KeyError, OSError, AttributeError) as error:
        raise ConfigError(
            f"part {part!r}: {type_in_words(value)} cannot be written as {extension}: {error}"
        ) from error


def _integer(value: Any) -> bytes:
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r} is not a whole number")
    return str(number).encode()


def _json(value: Any) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except TypeError:
        for name, each in value.items() if isinstance(value, dict) else ():
            try:
                _json(each)
            except TypeError as error:
                raise TypeError(f"field {name!r}: {error}") from error
        raise
    return text.encode("utf-8", "surrogateescape")


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold for one from a table cell."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    raise TypeError(
        f"JSON cannot represent {type_in_words(value)}; convert it, e.g. to a number or text"
    )


def _npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(value), allow_pickle=False)
    return buffer.getvalue()


def _npz(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **value)
    return buffer.getvalue()


def _tenbin(value: Any) -> bytes:
    arrays = value if isinstance(value, (list, tuple)) else [value]
    return encode_tenbin([np.asarray(array) for array in arrays])


def _msgpack(value: Any) -> bytes:
    with needs_extra("formats", "mp parts need msgpack"):
        import msgpack
    packed: bytes = msgpack.packb(value)
    return packed


def _cbor(value: Any) -> bytes:
    with needs_extra("formats", "cbor parts need cbor2"):
        import cbor2
    encoded: bytes = cbor2.dumps(value)
    return encoded


def _torch(value: Any) -> bytes:
    with needs_extra("torch", "pth parts need torch"):
        import torch
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _image(name: str, **options: Any) -> Callable[[Any], bytes]:
    def encode(value: Any) -> bytes:
        from PIL import Image

        image = value if isinstance(value, Image.Image) else Image.fromarray(_pixels(value))
        buffer = io.BytesIO()
        image.save(buffer, name, **options)
        return buffer.getvalue()

    return encode


def _pixels(value: Any) -> Any:
    pixels = np.asarray(value)
    if pixels.dtype != np.uint8:
        raise ValueError(f"expected an image or an array of uint8, found {pixels.dtype}")
    return pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("ten", "tb"), _tenbin),
    **dict.fromkeys(("mp", "msg"), _msgpack),
    **dict.fromkeys(("pyd", "pickle", "pkl"), pickle.dumps),
    **dict.fromkeys(("jpg", "jpeg"), _image("JPEG", quality=_JPEG_QUALITY)),
    **dict.fromkeys(("tif", "tiff"), _image("TIFF")),
    **dict.fromkeys(("ppm", "pgm", "pbm"), _image("PPM")),
    "png": _image("PNG"),
    "webp": _image("WEBP", lossless=True),
    "bmp": _image("BMP"),
    "gif": _image("GIF"),
    "npy": _npy,
    "npz": _npz,
    "cbor": _cbor,
    "pth": _torch,
}
