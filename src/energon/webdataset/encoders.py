"""Turn the values of samples into bytes, by the extension of their field."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Any

import numpy as np

from energon.errors import ConfigError
from energon.messages import type_in_words
from energon.prepare.writers.encode import Content, encode_part

Encoder = Callable[[str, Any], Content]
"""`encode(field, value)` returns the content of a field."""

_IMAGES = frozenset(
    ["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "tif", "tiff", "webp", "bmp", "gif", "img", "image"]
)
_OTHER_NAMES = {
    **dict.fromkeys(("img", "image"), "jpg"),
    "class": "cls",
    "tenbin": "ten",
    "msgpack": "mp",
}
_TEXTS = frozenset(["txt", "text", "transcript", "html", "htm"])
_EXTENSIONS = (
    *("cls", "cls2", "class", "count", "index", "inx", "id", "txt", "text", "transcript", "html"),
    *("htm", "pyd", "pickle", "pkl", "pth", "npy", "npz", "ten", "tenbin", "tb", "json", "jsn"),
    *("mp", "msgpack", "msg", "cbor", *sorted(_IMAGES)),
)
TOLERANCE = 1e-3
"""How far float pixel values may exceed the range 0 to 1."""


def encode_field(field: str, value: Any) -> Content:
    """Return the content of a field, by its last extension.

    Supports everything that `encode_part` of `energon.prepare` does, and images from float arrays
    in 0 to 1 and from tensors (C, H, W), and the extensions class, html, htm, tenbin, msgpack,
    img and image.

    Raises:
        ConfigError: If a value of this type cannot be written under this name.
    """
    if isinstance(value, bytes | bytearray | memoryview | str):
        return encode_part(field, value)
    extension = _extension(field)
    if extension in _IMAGES:
        value = to_image(value, field)
    if extension in _TEXTS:
        raise ConfigError(f"field {field!r} is {type_in_words(value)}, expected text (str)")
    known = _OTHER_NAMES.get(extension)
    if known is None:
        return encode_part(field, value)
    place = field.lower().rindex(extension)
    return encode_part(f"{field[:place]}{known}{field[place + len(extension) :]}", value)


def bytes_only(field: str, value: Any) -> Content:
    """Return a field that must be bytes, or the path of a file that contains them.

    Raises:
        ConfigError: If it is something else.
    """
    if not isinstance(value, bytes | bytearray | memoryview | PathLike):
        raise ConfigError(
            f"field {field!r} is {type_in_words(value)}; with encoder=False, fields are bytes"
        )
    return encode_part(field, value)


def table_encoder(handlers: Mapping[str, Callable[[Any], Any]]) -> Encoder:
    """Return an encoder with a function for each extension, and no others."""

    def encode(field: str, value: Any) -> Content:
        if isinstance(value, bytes | bytearray | memoryview | str):
            return encode_part(field, value)
        extension = _extension(field)
        if extension not in handlers:
            raise ConfigError(
                f"field {field!r} is {type_in_words(value)}, and the encoder knows "
                f"{', '.join(sorted(handlers))} only"
            )
        content = encode_part("bin", handlers[extension](value))
        is_packed = field.lower().endswith(".gz")
        return _packed(content) if is_packed else content

    return encode


def field_encoder(spec: Any) -> Encoder | None:
    """Return the encoder for an `encoder` argument; None if it is a function of whole samples.

    Raises:
        ConfigError: If it is invalid.
    """
    if spec is True:
        return _encode_registered
    if spec is False or spec is None:
        return bytes_only
    if isinstance(spec, Mapping):
        return table_encoder(spec)
    if callable(spec):
        return None
    raise ConfigError(
        f"encoder={spec!r}: expected True, False, a dict of functions by extension, or a function "
        "of a sample"
    )


def make_encoder(spec: Any) -> Callable[[Any], Any]:
    """Return the function of whole samples for an `encoder` argument."""
    encode = field_encoder(spec)
    if encode is None:
        found: Callable[[Any], Any] = spec
        return found

    def encode_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value if name.startswith("_") else content_bytes(encode(name, value))
            for name, value in sample.items()
        }

    return encode_sample


def content_bytes(content: Content) -> bytes:
    """Return the content of a field, read from its file if it is in one."""
    return content if isinstance(content, bytes) else content.read_bytes()


def _encode_registered(field: str, value: Any) -> Content:
    """Encode like `encode_field`, unless a program has registered a function for the extension."""
    extension = _extension(field)
    if default_handlers.get(extension) is _BUILT_IN.get(extension):
        return encode_field(field, value)
    return table_encoder(default_handlers)(field, value)


def to_image(value: Any, field: str = "image") -> Any:
    """Return an image as a Pillow image, or as an array of uint8 (H, W) or (H, W, C).

    Args:
        value: A Pillow image, or an array or tensor of uint8 or of floats in 0 to 1; tensors may
            have their channels first.
        field: Its name in messages.

    Raises:
        ConfigError: If floats are outside 0 to 1.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        if value.ndim == 3 and value.shape[0] in (1, 3, 4):
            value = value.transpose(1, 2, 0)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        low, high = float(value.min(initial=0)), float(value.max(initial=0))
        if not -TOLERANCE < low <= high < 1 + TOLERANCE:
            raise ConfigError(
                f"field {field!r}: floats of an image are between 0 and 1, found {low} to {high}"
            )
        return np.rint(np.clip(value, 0, 1) * 255).astype(np.uint8)
    return value


def _extension(field: str) -> str:
    return field.lower().removesuffix(".gz").rpartition(".")[2]


def _packed(content: Content) -> Content:
    if isinstance(content, bytes):
        return gzip.compress(content, mtime=0)
    return encode_part("bin.gz", content)


def _encode_as(extension: str, value: Any) -> Content:
    return encode_field(f"value.{extension}", value)


_BUILT_IN: dict[str, Callable[[Any], Any]] = {
    extension: partial(_encode_as, extension) for extension in _EXTENSIONS
}
default_handlers = dict(_BUILT_IN)
"""Functions that encode a value, by extension, used by `encoder=True`. A program may change them,
or a copy that it passes to a writer as `encoder`."""
