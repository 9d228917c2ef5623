"""Write samples to tar files; and encode single values as writers do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from energon.prepare.writers.encode import Content
from energon.webdataset.writing.encoders import (
    default_handlers,
    encode_field,
    table_encoder,
    to_image,
)
from energon.webdataset.writing.shard_writer import ShardWriter
from energon.webdataset.writing.tar_writer import TarWriter

__all__ = [
    "ShardWriter",
    "TarWriter",
    "add_handlers",
    "cbor_dumps",
    "default_handlers",
    "encode_based_on_extension",
    "imageencoder",
    "make_handlers",
    "mp_dumps",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Return an image as the bytes of a file, see `encoders.to_image` for what it may be."""
    encoded = encode_field(f"image.{format.lower()}", to_image(image))
    return _content(encoded)


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an `.npy` file."""
    return _content(encode_field("array.npy", data))


def torch_dumps(data: Any) -> bytes:
    """Return anything as the bytes of a `.pth` file."""
    return _content(encode_field("data.pth", data))


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    """Return arrays by name as the bytes of an `.npz` file."""
    return _content(encode_field("arrays.npz", data))


def tenbin_dumps(data: Any) -> bytes:
    """Return an array, or a list of them, in the tenbin format."""
    return _content(encode_field("arrays.ten", data))


def mp_dumps(data: Any) -> bytes:
    """Return a value in MessagePack."""
    return _content(encode_field("data.mp", data))


def cbor_dumps(data: Any) -> bytes:
    """Return a value in CBOR."""
    return _content(encode_field("data.cbor", data))


def make_handlers() -> dict[str, Callable[[Any], Any]]:
    """Return functions that encode a value, by extension, to be changed and given to a writer."""
    return dict(default_handlers)


def add_handlers(
    d: dict[str, Callable[[Any], Any]], keys: str | Iterable[str], value: Callable[[Any], Any]
) -> None:
    """Let a function encode some extensions, which are a list or have spaces between them."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def encode_based_on_extension(
    sample: Mapping[str, Any], handlers: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Return a sample with its fields encoded by their extensions.

    Args:
        sample: Fields that begin with an underscore are left as they are.
        handlers: Functions that encode a value, by extension; None means those of writers.
    """
    encode = encode_field if handlers is None else table_encoder(handlers)
    return {
        name: value if name.startswith("_") else _content(encode(name, value))
        for name, value in sample.items()
    }


def _content(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
