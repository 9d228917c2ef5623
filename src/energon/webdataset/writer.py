"""Write samples to tar files; and encode single values as writers do."""

from __future__ import annotations

from typing import Any

from energon.prepare.encode import Content
from energon.webdataset.encoders import default_handlers, encode_field, to_image
from energon.webdataset.shard_writer import ShardWriter
from energon.webdataset.tar_writer import TarWriter

__all__ = [
    "ShardWriter",
    "TarWriter",
    "default_handlers",
    "imageencoder",
    "numpy_dumps",
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


def _content(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
