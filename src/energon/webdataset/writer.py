"""Write samples to tar files; and encode single values as writers do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from energon.errors import ConfigError
from energon.webdataset.utils import reexport
from energon.webdataset.writing.encoders import (
    content_bytes,
    default_handlers,
    encode_field,
    sample_encoder,
    table_encoder,
    to_image,
)
from energon.webdataset.writing.shard_writer import ShardWriter
from energon.webdataset.writing.tar_writer import TarWriter

__all__ = [
    "ShardWriter",
    "TarWriter",
    "add_handlers",
    "bytestr",
    "cbor_dumps",
    "default_handlers",
    "encode_based_on_extension",
    "encode_based_on_extension1",
    "imageencoder",
    "make_encoder",
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
    return content_bytes(encoded)


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an `.npy` file."""
    return content_bytes(encode_field("array.npy", data))


def torch_dumps(data: Any) -> bytes:
    """Return anything as the bytes of a `.pth` file."""
    return content_bytes(encode_field("data.pth", data))


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    """Return arrays by name as the bytes of an `.npz` file."""
    return content_bytes(encode_field("arrays.npz", data))


def tenbin_dumps(x: Any) -> bytes:
    """Return an array, or a list of them, in the tenbin format."""
    return content_bytes(encode_field("arrays.ten", x))


def mp_dumps(x: Any) -> bytes:
    """Return a value in MessagePack."""
    return content_bytes(encode_field("data.mp", x))


def cbor_dumps(x: Any) -> bytes:
    """Return a value in CBOR."""
    return content_bytes(encode_field("data.cbor", x))


def make_handlers() -> dict[str, Callable[[Any], Any]]:
    """Return functions that encode a value, by extension, to be changed and given to a writer."""
    return dict(default_handlers)


def add_handlers(
    d: dict[str, Callable[[Any], Any]], keys: str | Iterable[str], value: Callable[[Any], Any]
) -> None:
    """Let a function encode some extensions, which are a list or have spaces between them."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def bytestr(data: Any) -> bytes:
    """Return bytes as they are, anything else as its text in ASCII."""
    return data if isinstance(data, bytes) else str(data).encode("ascii")


def encode_based_on_extension1(
    data: Any, tname: str, handlers: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Return one field encoded by its extension, see `encode_based_on_extension`."""
    if not tname.startswith("_"):
        return content_bytes(table_encoder(handlers)(tname, data))
    if not isinstance(data, str):
        raise ConfigError(
            f"field {tname!r} is a {type(data).__name__}: the values of metadata must be text"
        )
    return data


def encode_based_on_extension(
    sample: Mapping[str, Any], handlers: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Return a sample with its fields encoded by their extensions.

    Args:
        sample: Fields that begin with an underscore are left as they are.
        handlers: Functions that encode a value, by extension; None means those of writers.
    """
    encoded: dict[str, Any] = make_encoder(True if handlers is None else handlers)(sample)
    return encoded


make_encoder = sample_encoder

__getattr__ = reexport(__name__, {"gopen": "gopen:"})
