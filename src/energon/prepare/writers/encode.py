"""Turn values into the bytes of parts, according to their extension."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable
from datetime import date, time
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from energon.decode.values import encode_tenbin
from energon.errors import ConfigError, MissingExtraError, needs_extra
from energon.messages import type_in_words

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
    *rest, extension = part.lower().split(".")
    if extension == "gz" and rest:
        inner = encode_part(".".join(rest), value)
        content = inner.read_bytes() if isinstance(inner, Path) else inner
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


_jpeg = _image("JPEG", quality=_JPEG_QUALITY)
_tiff = _image("TIFF")
_portable = _image("PPM")
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "count"), _integer),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("ten", "tb"), _tenbin),
    **dict.fromkeys(("mp", "msg"), _msgpack),
    **dict.fromkeys(("pyd", "pickle", "pkl"), pickle.dumps),
    **dict.fromkeys(("jpg", "jpeg"), _jpeg),
    **dict.fromkeys(("tif", "tiff"), _tiff),
    **dict.fromkeys(("ppm", "pgm", "pbm"), _portable),
    "png": _image("PNG"),
    "webp": _image("WEBP", lossless=True),
    "bmp": _image("BMP"),
    "gif": _image("GIF"),
    "npy": _npy,
    "npz": _npz,
    "cbor": _cbor,
    "pth": _torch,
}
