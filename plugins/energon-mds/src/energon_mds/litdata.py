"""The index of a dataset that LitData has optimized, and the contents of its items."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.errors import ConfigError, EnergonError, FormatError, MissingExtraError, needs_extra
from energon.formats.arrow import read_batches
from energon.formats.text import parse_json
from energon.messages import counted, describe_error
from energon_mds.records import (
    ChunkFile,
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

if TYPE_CHECKING:
    import pyarrow as pa


_MAGIC = b"LDFZ01\0\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_VERSION = 1
_CONTAINERS = ("builtins.dict", "builtins.list", "builtins.tuple")


@dataclass(frozen=True)
class LitDataIndex:
    """The content of an index.

    Args:
        chunks: Name of the file, number of items and bytes of each chunk.
        compression: How they are packed; None if they are not.
        level: What is packed on its own: "sample", "batch" for frames of items, else the chunk.
        formats: How each leaf of an item is stored.
        shape: Puts the leaves of an item together.
        is_bare: Whether items are the tokens of a text, without their size.
        types: The type of each entry, where chunks may have a table in place of items; else None.
        sizes_are_exact: Whether chunks have as many bytes as stated.
    """

    chunks: tuple[tuple[str, int, int], ...]
    compression: str | None
    level: str | None
    formats: tuple[str, ...]
    shape: Callable[[Iterator[Any]], Any]
    is_bare: bool
    types: dict[str, str] | None
    sizes_are_exact: bool

    def item(self, leaves: list[Any]) -> dict[str, Any]:
        """Return an item as parts; entries of what is not a dict are called `0`, `1` and so on."""
        item = self.shape(iter(leaves))
        if isinstance(item, dict):
            return {str(name): value for name, value in item.items()}
        entries = item if isinstance(item, list) else [item]
        return {str(number): value for number, value in enumerate(entries)}


def parse_litdata_index(index: Any, *, origin: str) -> LitDataIndex:
    """Parse an index.

    Raises:
        FormatError: If it is invalid.
        ConfigError: If the chunks are encrypted.
    """
    try:
        config = index["config"]
        loader = config.get("item_loader")
        if loader in _OTHER_LOADERS:
            raise ConfigError(
                f"{origin}: was written for LitData's {loader}; {_OTHER_LOADERS[loader]}"
            )
        compression, level = config["compression"], config.get("compression_level")
        formats = tuple(map(str, config["data_format"]))
        spec = parse_json(config["data_spec"], origin="data_spec")[1]
        if (leaves := _num_leaves(spec)) != len(formats):
            raise ValueError(
                f"items have {counted(leaves, 'value')}, but "
                f"{counted(len(formats), 'format is', 'formats are')} listed"
            )
        parsed = LitDataIndex(
            chunks=tuple(
                (
                    _name(chunk["filename"]),
                    stated_number(chunk["chunk_size"]),
                    stated_number(chunk["chunk_bytes"]),
                )
                for chunk in index["chunks"]
            ),
            compression=compression,
            level=level,
            formats=formats,
            shape=_shape(spec),
            is_bare=_is_bare(config),
            types=_types(config, spec["type"]),
            # Versions that record types also count what is around items.
            sizes_are_exact="types" in config and (not compression or level in _INSIDE),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        problem = describe_error(error)
        raise FormatError(f"{origin}: not an index of LitData chunks: {problem}") from error
    if config.get("encryption"):
        raise ConfigError(f"{origin}: is encrypted; optimize it again without encryption")
    return parsed


def _types(config: Mapping[str, Any], container: str | None) -> dict[str, str] | None:
    """Return the types of dicts of plain values, which LitData writes as tables if it can."""
    types, formats = config.get("types"), config["data_format"]
    if (
        container != "builtins.dict"
        or not isinstance(types, dict)
        or not _PLAIN.issuperset(formats)
    ):
        return None
    return {name: kind if isinstance(kind, str) else kind["type"] for name, kind in types.items()}


class LitDataFormat:
    """How items are stored in the chunks of a dataset; see `ChunkFormat`.

    Args:
        index: The content of `index.json`.
        origin: The file, for messages.
        allow: "pickle" permits unpickling items.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If chunks are encrypted, or items have something that is not known.
        SecurityError: If items are pickled, which is not allowed.
    """

    def __init__(self, index: Any, origin: str, allow: Collection[str] = ()) -> None:
        self._origin = origin
        self._allow = allow
        self.index = parse_litdata_index(index, origin=origin)
        self.chunks = [ChunkFile(*chunk) for chunk in self.index.chunks]
        self.sizes_are_exact = self.index.sizes_are_exact
        if self.index.types is None:
            self._decoders  # noqa: B018  # an unknown format is an error now, not at the first item

    @cached_property
    def _decoders(self) -> list[Callable[[bytes], Any]]:
        return [litdata_decoder(kind, self._origin, self._allow) for kind in self.index.formats]

    @cached_property
    def columns(self) -> dict[str, str]:
        """How each entry of an item is stored."""
        named = self.index.item(list(self.index.formats))
        stored = {name: kind if isinstance(kind, str) else "struct" for name, kind in named.items()}
        return stored | (self.index.types or {})

    @property
    def is_packed(self) -> bool:
        """Whether chunks are compressed as a whole, in frames of many items, or may be tables."""
        index = self.index
        return index.types is not None or (bool(index.compression) and index.level != "sample")

    def records(self, number: int, data: bytes, origin: object, start: int = 0) -> Iterator[Sized]:
        """Yield the items of a chunk from number `start` on."""
        index = self.index
        if index.types is not None and data.endswith(_MARK):
            return table_rows(data, origin, start)
        return litdata_items(
            data, origin, compression=index.compression, level=index.level, start=start
        )

    def row(
        self,
        number: int,
        record: Any,
        origin: object,
        takes: Callable[[str], bool] = lambda name: True,
    ) -> dict[str, Any]:
        """Return the entries of an item that are taken."""
        if isinstance(record, TableRow):
            return record.values(takes, origin)
        compression = self.index.compression
        if compression and self.index.level == "sample":
            record = decompress(record, origin, compression)
        contents = (
            [bytes(record)]
            if self.index.is_bare
            else fields(record, [None] * len(self._decoders), origin)
        )
        leaves = zip(self._decoders, contents, strict=True)
        item = self.index.item(decoded(leaves, origin))
        return {name: value for name, value in item.items() if takes(name)}


def _is_bare(config: dict[str, Any]) -> bool:
    # Early versions recorded no loader, and wrote every single tensor so.
    is_for_tokens = config.get("item_loader", "TokensLoader") == "TokensLoader"
    kind, *others = map(str, config["data_format"])
    return is_for_tokens and not others and kind.partition(":")[0] in _FLAT


def _name(value: Any) -> str:
    name = file_name(value)
    if "/" in name:
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    return name


def litdata_items(
    data: bytes, origin: object, *, compression: str | None, level: str | None, start: int = 0
) -> Iterator[memoryview]:
    """Yield the items of a chunk from number `start` on.

    Args:
        data: The file.
        origin: Its name in messages.
        compression: Name of the method; None for none.
        level: "chunk" or None if the whole file is compressed, "batch" for frames of items,
            "sample" for items, which are yielded as they are.
        start: Number of the first item.

    Raises:
        FormatError: If the chunk is damaged.
    """
    if level == "batch":
        yield from _of_frames(data, origin, compression or "zstd", start)
        return
    if compression and level in (None, "", "chunk"):
        data = decompress(data, origin, compression)
    yield from records(data, origin, start)


def _of_frames(data: bytes, origin: object, compression: str, start: int) -> Iterator[memoryview]:
    try:
        magic, version, _, num_items, _, num_frames = _HEAD.unpack_from(data)
        edges = np.frombuffer(data, "<u4", num_items + 1, _HEAD.size).astype(np.int64)
        position = _HEAD.size + 4 * (num_items + 1)
        frames = [
            _FRAME.unpack_from(data, position + number * _FRAME.size)
            for number in range(num_frames)
        ]
    except (struct.error, ValueError) as error:
        raise FormatError(f"{origin}: is truncated: {error}") from error
    if (magic, version) != (_MAGIC, _VERSION):
        raise FormatError(f"{origin}: begins with {data[:10]!r}, expected {_MAGIC!r}, version 1")
    for first, count, offset, packed, size in frames:
        if first + count <= start:
            continue
        content = memoryview(decompress(data[offset : offset + packed], origin, compression))
        if first + count > num_items or edges[first + count] - edges[first] != size:
            raise FormatError(f"{origin}: has no items {first} to {first + count} of {size} bytes")
        if len(content) != size:
            raise FormatError(
                f"{origin}: items {first} to {first + count} do not have {size} bytes"
            )
        for number in range(max(first, start), first + count):
            begin, end = (edges[number : number + 2] - edges[first]).tolist()
            yield content[begin:end]


def _shape(spec: Any) -> Callable[[Iterator[Any]], Any]:
    """Return a function that assembles an item from its leaves."""
    kind = spec["type"]
    if kind is None:
        return next
    if kind not in _CONTAINERS:
        raise ValueError(f"items have a {kind}")
    children = [_shape(child) for child in spec["children_spec"]]
    if kind == "builtins.dict":
        names = parse_json(spec["context"], origin="context")
        return lambda leaves: {
            name: child(leaves) for name, child in zip(names, children, strict=True)
        }
    return lambda leaves: [child(leaves) for child in children]


def _num_leaves(spec: Any) -> int:
    return 1 if spec["type"] is None else sum(map(_num_leaves, spec["children_spec"]))


def litdata_decoder(kind: str, origin: object, allow: Collection[str]) -> Callable[[bytes], Any]:
    """Return a decoder for a leaf of this format. Media stay encoded.

    Raises:
        MissingExtraError: If only LitData can read it and is not installed.
        ConfigError: If LitData does not know it either.
        SecurityError: If it is pickled, which is not allowed.
    """
    name, _, more = kind.partition(":")
    if name in _PICKLED:
        check_unpickling(f"{origin}: items hold pickled objects ({kind!r})", allow)
    if name in _DECODERS:
        return _DECODERS[name]
    if name in _FLAT and more.isdecimal() and int(more) in _FLAT[name]:
        return partial(np.frombuffer, dtype=_FLAT[name][int(more)])
    try:
        from litdata.streaming.serializers import _SERIALIZERS
    except ImportError as error:
        raise MissingExtraError(
            f"{origin}: items hold a {kind!r}, which only LitData itself can read: "
            "pip install litdata"
        ) from error
    if name not in _SERIALIZERS:
        raise ConfigError(f"{origin}: unsupported LitData type {kind!r}")
    serializer = copy(_SERIALIZERS[name])
    serializer.setup(kind)
    decode: Callable[[bytes], Any] = serializer.deserialize
    return decode


_FIRST_OF_JSON = 0x21


def nested_value(content: bytes) -> Any:
    r"""Return the lists, dicts and plain values that LitData stores in one field.

    A value begins with a byte for its type. Numbers are little-endian, lengths and counts
    32-bit; texts follow their length in bytes:

    | byte | value |
    |---|---|
    | 0 | JSON |
    | 1, 2, 3, 4 | a list of str, int64, float64 or bool (a byte each), after their number |
    | 5 | a dict: the number of its entries, then keys, as text, and values in turn |
    | 6 | dicts with the same keys: their number, that of the keys, the keys, then all values, \
    each after a byte for its type: 16 to 20 for None, str, int64, float64, bool |
    | 7, 8, 9, 10, 11 | str, int64, float64, bool, None |

    Early versions wrote JSON alone, which begins with a larger byte.

    Raises:
        ValueError: If it is invalid.
        FormatError: If JSON in it is invalid.
    """
    if not content or content[0] >= _FIRST_OF_JSON:
        return parse_json(content, origin="json")
    reader = _Reader(content)
    try:
        value = reader.value()
    except RecursionError:
        raise ValueError("values are nested too deep") from None
    if reader.position != len(content):
        raise ValueError(f"field has {len(content)} bytes, its value ends after {reader.position}")
    return value


class _Reader:
    """Reads values one after the other."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def take(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.content):
            raise ValueError(
                f"field has {len(self.content)} bytes, its value needs {self.position}"
            )
        return self.content[start : self.position]

    def size(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def text(self) -> str:
        return self.take(self.size()).decode()

    def numbers(self, letter: str, count: int) -> list[Any]:
        size = struct.calcsize(f"<{letter}")
        return list(struct.unpack(f"<{count}{letter}", self.take(size * count)))

    def value(self) -> Any:
        kind = self.take(1)[0]
        if kind not in _READ:
            raise ValueError(f"a value begins with the unknown byte {kind}")
        return _READ[kind](self)

    def entries(self) -> dict[str, Any]:
        return {self.text(): self.value() for _ in range(self.size())}

    def rows(self) -> list[dict[str, Any]]:
        count = self.size()
        keys = [self.text() for _ in range(self.size())]
        if count and not keys:
            raise ValueError(f"{count} dicts have no keys")
        return [{key: _READ_CELL[self.take(1)[0]](self) for key in keys} for _ in range(count)]


_SCALARS: tuple[Callable[[_Reader], Any], ...] = (
    _Reader.text,
    lambda reader: reader.numbers("q", 1)[0],
    lambda reader: reader.numbers("d", 1)[0],
    lambda reader: reader.numbers("?", 1)[0],
)
_READ: dict[int, Callable[[_Reader], Any]] = {
    0: lambda reader: parse_json(reader.take(reader.size()), origin="json"),
    1: lambda reader: [reader.text() for _ in range(reader.size())],
    2: lambda reader: reader.numbers("q", reader.size()),
    3: lambda reader: reader.numbers("d", reader.size()),
    4: lambda reader: reader.numbers("?", reader.size()),
    5: _Reader.entries,
    6: _Reader.rows,
    **dict(enumerate(_SCALARS, 7)),
    11: lambda reader: None,
}
_READ_CELL: dict[int, Callable[[_Reader], Any]] = {
    0x10: lambda reader: None,
    **dict(enumerate(_SCALARS, 0x11)),
}


def _array(content: bytes, *, order: str, types: Mapping[int, str]) -> Any:
    """Return an array: the number of its type, its rank and its shape, then its values."""
    number, rank = np.frombuffer(content, f"{order}u4", 2).tolist()
    shape = np.frombuffer(content, f"{order}u4", rank, 8).tolist()
    return np.frombuffer(content, types[number], offset=8 + 4 * rank).reshape(shape)


_NUMPY = {
    **{0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"},
    **{8: "<f2", 9: "<f4", 10: "<f8", 11: "<c8", 12: "<c16", 13: "?"},
}
_TORCH = {
    **{0: "<f4", 1: "<f4", 2: "<f8", 3: "<f8", 4: "<c8", 5: "<c8", 6: "<c16", 7: "<c16"},
    **{8: "<f2", 9: "<f2", 11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4"},
    **{17: "<i8", 18: "<i8", 19: "?", 20: "<u2"},
}
"""Types of arrays and tensors by the number that stands for them."""
_FLAT = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}
_PLAIN = frozenset({"str", "int", "float", "bool", "bytes", "json", "pickle"})
"""How the entries of items are stored that may be in tables, where None is not pickled."""
_PICKLED = frozenset({"pickle", "graph"})
_INSIDE = ("sample", "batch")
"""Levels of compression within a chunk, whose size is that of the file."""
_OTHER_LOADERS = {
    "TemporalArrayLoader": "write its arrays again with the default loader",
    "ParquetLoader": "its chunks are Parquet files, read them as FOLDER/*.parquet",
}

_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("str", "string", "text"), bytes.decode),
    "bool": lambda content: content[0] != 0,
    "json": nested_value,
    "int": lambda content: np.frombuffer(content, "<i8")[0].item(),
    "float": lambda content: np.frombuffer(content, "<f8")[0].item(),
    "jpeg": encoded_image,
    "pil": pil_image,
    "jpeg_array": image_list,
    "numpy": partial(_array, order="<", types=_NUMPY),
    "tensor": partial(_array, order=">", types=_TORCH),
    "pickle": unpickle,
    **dict.fromkeys(("bytes", "image", "audio", "video", "file"), bytes),
}


_MARK = b"LDARW01\0"
_END = struct.Struct(f"<I{len(_MARK)}s")


class TableRow:
    """A row of a record batch. Its length is about the number of bytes that it takes.

    Args:
        batch: The record batch.
        names: The names of its columns.
        number: Which of its rows it is.
        is_valid: Whether the batch is known to be valid; otherwise, the row is checked.
    """

    def __init__(
        self, batch: pa.RecordBatch, names: Sequence[str], number: int, is_valid: bool
    ) -> None:
        self._batch, self._names = batch, names
        self._number, self._is_valid = number, is_valid

    def __len__(self) -> int:
        return int(self._batch.nbytes // max(1, self._batch.num_rows))

    def values(self, takes: Callable[[str], bool], origin: object) -> dict[str, Any]:
        """Return the columns that are taken.

        Raises:
            FormatError: If a value cannot be read.
        """
        row = self._batch.slice(self._number, 1)
        named = zip(self._names, row.columns, strict=True)
        columns = {name: column for name, column in named if takes(name)}
        try:
            if not self._is_valid:
                for column in columns.values():
                    column.validate(full=True)
            return {name: column[0].as_py() for name, column in columns.items()}
        except Exception as error:  # text that is not UTF-8, for example
            problem = describe_error(error)
            raise FormatError(f"{origin}: has a value that cannot be read: {problem}") from error


def table_rows(data: bytes, origin: object, start: int = 0) -> Iterator[TableRow]:
    """Yield the rows of the table at the end of a chunk, from number `start` on.

    Its records are then empty. The table is a file or, in early versions, a stream of Arrow,
    followed by its size (32-bit, little-endian) and eight bytes that mark it.

    Raises:
        FormatError: If the table is damaged.
        MissingExtraError: If pyarrow is not installed.
    """
    with needs_extra("parquet", f"{origin}: its rows are an Arrow table, which needs pyarrow"):
        import pyarrow as pa
    size, _ = _END.unpack_from(data, len(data) - _END.size)
    begin = len(data) - _END.size - size
    try:
        _, batches = read_batches(pa.py_buffer(data).slice(begin, size), origin=str(origin))
        for batch in batches:
            names, is_valid = batch.schema.names, _is_valid(batch)
            for number in range(start, batch.num_rows):
                yield TableRow(batch, names, number, is_valid)
            start = max(0, start - batch.num_rows)
    except EnergonError:
        raise
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        problem = describe_error(error)
        raise FormatError(
            f"{origin}: its rows are not a complete Arrow table: {problem}; copy it again"
        ) from error


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Return whether all values of a batch are valid."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
