"""The index of a dataset of MosaicML Streaming, and the contents of its columns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from energon.errors import ConfigError, FormatError
from energon.formats.text import parse_json
from energon.messages import describe_error
from energon_mds.records import (
    ChunkFile,
    check_compression,
    check_unpickling,
    decoded,
    decompress,
    encoded_image,
    fields,
    file_name,
    image_list,
    pil_image,
    records,
    stated_number,
    unpickle,
)

_SCALARS = {
    "int": "<i8",
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
_DTYPES = {
    **{8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4"},
    **{64: "<u8", 65: "<i8", 66: "<f8"},
}
"""Types of arrays by the number that stands for them."""


@dataclass(frozen=True)
class MdsShard:
    """A shard, as the index describes it.

    Args:
        name: Its file.
        count: How many samples it has.
        size: Bytes of the file.
        compression: How it is packed; None if it is not.
        names: The columns.
        sizes: Bytes of each; None if they differ.
        encodings: How each is stored.
        hashes: Hashes of the file by algorithm, in hexadecimal digits.
    """

    name: str
    count: int
    size: int
    compression: str | None
    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    encodings: tuple[str, ...]
    hashes: tuple[tuple[str, str], ...] = ()


def parse_mds_index(index: Any, *, origin: str) -> list[MdsShard]:
    """Return the shards that an index lists.

    Raises:
        FormatError: If it is invalid.
        ConfigError: If shards are of another format.
    """
    try:
        return [_shard(entry, origin) for entry in index["shards"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError | FormatError):
            raise
        problem = describe_error(error)
        raise FormatError(f"{origin}: not an index of MDS shards: {problem}") from error


def _shard(entry: Mapping[str, Any], origin: str) -> MdsShard:
    if entry["format"] != "mds":
        raise ConfigError(
            f"{origin}: has {entry['format']} shards, expected mds; convert them to MDS"
        )
    compression = entry["compression"]
    if compression:
        check_compression(compression, f"{origin}: {entry['zip_data']['basename']}")
    file = entry["zip_data"] if compression else entry["raw_data"]
    hashes = tuple((str(kind), str(value)) for kind, value in (file.get("hashes") or {}).items())
    return MdsShard(
        file_name(file["basename"]),
        stated_number(entry["samples"]),
        stated_number(file["bytes"]),
        compression,
        *_columns(entry),
        hashes,
    )


def _columns(
    entry: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[int | None, ...], tuple[str, ...]]:
    """Return the names, sizes and encodings of the columns of a shard."""
    names, sizes, encodings = (
        entry[key] for key in ("column_names", "column_sizes", "column_encodings")
    )
    if len({len(names), len(sizes), len(encodings)}) > 1:
        raise ValueError("the numbers of column names, sizes and encodings differ")
    texts = [*names, *encodings]
    if not isinstance(names, list) or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"columns are called {names!r} and encoded as {encodings!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"several columns of {names!r} have the same name")
    # A size of 0 stands for none, as in the library.
    fixed = (None if size is None else stated_number(size) or None for size in sizes)
    return tuple(names), tuple(fixed), tuple(encodings)


def _check_hashes(shard: MdsShard, data: bytes, origin: object) -> None:
    """Compare a shard with the hashes in the index, as far as Python can compute them."""
    for kind, value in shard.hashes:
        if kind in hashlib.algorithms_guaranteed and not kind.startswith("shake"):
            digest = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
            if digest != value.lower():
                raise FormatError(
                    f"{origin}: its {kind} is {digest}, but the index says {value}; the shard is "
                    "damaged or was replaced, copy it again"
                )


class MdsFormat:
    """How samples are stored in the shards of a dataset; see `ChunkFormat`.

    Args:
        index: The content of `index.json`.
        origin: The file, for messages.
        allow: "pickle" permits unpickling columns.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If shards are of another format, or a column has an unknown encoding.
        SecurityError: If a column is pickled, which is not allowed.
    """

    sizes_are_exact = True

    def __init__(self, index: Any, origin: str, allow: Collection[str] = ()) -> None:
        self._origin = origin
        self._allow = allow
        self.shards = parse_mds_index(index, origin=origin)
        self.chunks = [ChunkFile(each.name, each.count, each.size) for each in self.shards]
        self._by_columns: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Any]] = {}
        for number in range(len(self.shards)):
            self._decoders(number)

    @cached_property
    def columns(self) -> dict[str, str]:
        """The encoding of each column.

        Raises:
            FormatError: If shards have different columns.
        """
        kinds = {(each.names, each.encodings, each.sizes, each.compression) for each in self.shards}
        if len(kinds) > 1:
            raise FormatError(
                f"{self._origin}: its shards have {len(kinds)} different sets of columns; train on "
                "each set separately"
            )
        return {
            name: kind
            for names, kinds, *_ in kinds
            for name, kind in zip(names, kinds, strict=True)
        }

    @property
    def is_packed(self) -> bool:
        """Whether shards are compressed as a whole."""
        return any(shard.compression for shard in self.shards)

    def records(
        self, number: int, data: bytes, origin: object, start: int = 0
    ) -> Iterator[memoryview]:
        """Yield the records of a shard from number `start` on."""
        shard = self.shards[number]
        if not shard.compression:
            return records(data, origin, start)
        _check_hashes(shard, data, origin)
        return records(decompress(data, origin, shard.compression), origin, start)

    def row(
        self,
        number: int,
        record: bytes | memoryview,
        origin: object,
        takes: Callable[[str], bool] = lambda name: True,
    ) -> dict[str, Any]:
        """Return the columns of a record of a shard that are taken."""
        shard = self.shards[number]
        contents = fields(record, shard.sizes, origin)
        columns = zip(shard.names, self._decoders(number), contents, strict=True)
        read = [column for column in columns if takes(column[0])]
        values = decoded(((decode, content) for _, decode, content in read), origin)
        return dict(zip((name for name, *_ in read), values, strict=True))

    def _decoders(self, number: int) -> list[Callable[[bytes], Any]]:
        shard = self.shards[number]
        columns = shard.names, shard.encodings
        if columns not in self._by_columns:
            self._by_columns[columns] = [
                mds_decoder(encoding, name, self._origin, self._allow)
                for name, encoding in zip(*columns, strict=True)
            ]
        return self._by_columns[columns]


def mds_decoder(
    encoding: str, name: str, origin: object, allow: Collection[str]
) -> Callable[[bytes], Any]:
    """Return a decoder for a column with this encoding. Images stay encoded.

    Raises:
        ConfigError: If the encoding is not known.
        SecurityError: If the column is pickled, which is not allowed.
    """
    if encoding == "pkl":
        check_unpickling(f"{origin}: column {name!r} holds pickled objects", allow)
    if encoding in _SCALARS:
        dtype = _SCALARS[encoding]
        return lambda content: np.frombuffer(content, dtype)[0].item()
    if encoding in _DECODERS:
        return _DECODERS[encoding]
    kind, _, more = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = more.partition(":")
        has_type = not dtype or dtype in _SCALARS
        if has_type and all(size.isdecimal() for size in shape.split(",") if shape):
            dims = tuple(int(size) for size in shape.split(",")) if shape else None
            return partial(_array, dtype=_SCALARS.get(dtype, ""), shape=dims)
    raise ConfigError(
        f"{origin}: column {name!r} is encoded as {encoding!r}, which is not known here; known are "
        f"{', '.join(sorted([*_DECODERS, *_SCALARS, 'ndarray']))}"
    )


def _array(content: bytes, *, dtype: str, shape: tuple[int, ...] | None) -> Any:
    """Return an array; whatever the encoding does not specify precedes its values."""
    at = 0
    if not dtype:
        dtype, at = _DTYPES[content[0]], 1
    if shape is None:
        size = 1 << content[at] % 4
        rank = content[at] >> 2
        shape = tuple(np.frombuffer(content, f"<u{size}", rank, at + 1).tolist())
        at += 1 + rank * size
    return np.frombuffer(content, dtype, offset=at).reshape(shape)


def _image_list(content: bytes) -> list[bytes]:
    return image_list(content[4:])  # behind four bytes that mean nothing


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    **dict.fromkeys(("str", "str_decimal"), bytes.decode),
    "json": partial(parse_json, origin="json"),
    "str_int": int,
    "str_float": float,
    **dict.fromkeys(("jpeg", "png"), encoded_image),
    "pil": pil_image,
    **dict.fromkeys(("jpeg_array", "jpegarray"), image_list),
    **dict.fromkeys(("list[jpeg]", "list[png]"), _image_list),
    "list[pil]": lambda content: list(map(pil_image, _image_list(content))),
    "pkl": unpickle,
}
