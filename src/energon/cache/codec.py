"""The forms in which a cache stores files: raw, or decoded in a format of its own.

In the decoded format, a JSON header describes the value; arrays and bytes follow unencoded.

| bytes | content |
|---|---|
| 4 | bytes of the JSON (uint32, little-endian) |
| … | JSON: `value`, and `sizes` of the blocks |
| … | the blocks, each beginning at a multiple of 64 |

In `value`, a list is `["list", items]`, and so on: everything except None, bools, numbers and
strings is such a pair.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from energon.cache.contents import CachedContent
from energon.errors import FormatError
from energon.formats.json_text import parse_json
from energon.sources.files.store import FileStore

_LENGTH = struct.Struct("<I")
_ALIGN = 64
_NOTHING = np.empty(0, np.uint8)

Blocks = list[Any]


def encode(value: Any) -> bytes:
    """Encode None, numbers, str, bytes, arrays, tensors, and lists, tuples or dicts of these.

    Raises:
        TypeError: If the value contains anything else.
    """
    blocks: Blocks = []
    tree = _encode(value, blocks)
    text = json.dumps({"value": tree, "sizes": [block.nbytes for block in blocks]}).encode()
    parts = [_LENGTH.pack(len(text)), text]
    position = _LENGTH.size + len(text)
    for block in blocks:
        gap = -position % _ALIGN
        parts += [bytes(gap), block]
        position += gap + block.nbytes
    return b"".join(parts)


def decode(data: bytes | memoryview) -> Any:
    """Decode what `encode` returned. Arrays are writable copies."""
    (length,) = _LENGTH.unpack_from(data)
    position = _LENGTH.size + length
    header = parse_json(bytes(data[_LENGTH.size : position]), origin="cached value")
    blocks: Blocks = []
    for size in header["sizes"]:
        position += -position % _ALIGN
        blocks.append(memoryview(data)[position : position + size])
        position += size
    return _decode(header["value"], blocks)


def _encode(value: Any, blocks: Blocks) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_encode(item, blocks) for item in value]]
    if kind is dict:
        pairs = [[_encode(key, blocks), _encode(item, blocks)] for key, item in value.items()]
        return ["dict", pairs]
    if kind is bytes:
        return ["bytes", _add(memoryview(value), blocks)]
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        header = [value.dtype.str, list(value.shape)]
        return ["array", [*header, _add(_bytes_of(value), blocks)]]
    if kind.__module__ == "torch" and kind.__name__ == "Tensor":
        return _encode_tensor(value, blocks)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} cannot be cached as bytes")


def _encode_tensor(value: Any, blocks: Blocks) -> Any:
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise TypeError(f"a tensor of layout {value.layout} and {value.dtype} cannot be cached")
    plain = value.detach().cpu().contiguous()
    header = [str(value.dtype).removeprefix("torch."), list(value.shape)]
    flat = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else _NOTHING
    return ["tensor", [*header, _add(_bytes_of(flat), blocks)]]


def _bytes_of(array: Any) -> memoryview:
    flat: memoryview = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return flat


def _add(block: memoryview, blocks: Blocks) -> int:
    blocks.append(block)
    return len(blocks) - 1


def _decode(tree: Any, blocks: Blocks) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, content = tree
    return _DECODERS[kind](content, blocks)


def _decode_array(content: Any, blocks: Blocks) -> Any:
    dtype, shape, number = content
    return np.frombuffer(blocks[number], np.dtype(dtype)).reshape(shape).copy()


def _decode_tensor(content: Any, blocks: Blocks) -> Any:
    import torch

    dtype, shape, number = content
    if 0 in shape:
        return torch.empty(shape, dtype=_dtype(dtype))
    flat = torch.from_numpy(np.frombuffer(blocks[number], np.uint8).copy())
    return flat.view(_dtype(dtype)).reshape(shape)


def _dtype(name: str) -> Any:
    """Return the torch dtype of this name; other attributes of torch are refused."""
    import torch

    dtype = vars(torch).get(name)
    if type(dtype) is not torch.dtype:
        raise FormatError(f"a cached tensor is of {name!r}, which is not a dtype of torch")
    return dtype


_DECODERS: dict[str, Callable[[Any, Blocks], Any]] = {
    "list": lambda items, blocks: [_decode(item, blocks) for item in items],
    "tuple": lambda items, blocks: tuple(_decode(item, blocks) for item in items),
    "dict": lambda pairs, blocks: {_decode(k, blocks): _decode(v, blocks) for k, v in pairs},
    "bytes": lambda number, blocks: bytes(blocks[number]),
    "array": _decode_array,
    "tensor": _decode_tensor,
}


class Form(Protocol):
    """The form in which contents are stored."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Read a file, and return its stored form and where it came from."""

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value of a file from its stored form."""


class RawForm:
    """Stores files as they are, and decodes them on every use."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""
        return _digest((store.identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the file, and where it came from."""
        return store.get_raw(name)

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value that the store decodes the file to."""
        return store.decode(name, data)


class DecodedForm:
    """Decodes files in the background and stores their values, which are larger but ready to use.

    A value that would need pickle is stored as the file it was decoded from.
    """

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a value."""
        return _digest(("decoded", store.decoded_identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the value as bytes, and where its file came from."""
        raw, source = store.get_raw(name)
        try:
            return _VALUE + encode(store.decode(name, raw)), source
        except TypeError:
            return _FILE + raw, source

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value."""
        content = memoryview(data)[1:]
        if data[:1] == _VALUE:
            return decode(content)
        return store.decode(name, bytes(content))


_VALUE, _FILE = b"v", b"f"


def _digest(identity: Any) -> str:
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
