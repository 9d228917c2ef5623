"""Pack datasets of chunks of records: those of MosaicML Streaming, and those of LitData.

Either is a folder with an `index.json`. A chunk begins with its number of records N and N + 1
offsets, little-endian 32-bit numbers; a record with the sizes of its fields, where these differ,
followed by their contents.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from energon.errors import ConfigError, FormatError, MissingExtraError
from energon.extra import needs_extra
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.io.files import read_document
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, RowRules, Wanted, every
from energon.utf8 import decode_utf8

NAME = "index.json"


def read_json_index(folder: AnyPath) -> Any:
    """Return what the index of a folder says.

    Raises:
        FormatError: If it is not JSON.
        StorageError: If it cannot be read.
    """
    path = folder / NAME
    with reporting(path):
        text = decode_utf8(read_document(path), origin=str(path))
    return parse_json(text, origin=str(path), hint="copy the folder again, or write it again")


def read_chunk(path: AnyPath, *, compression: str | None) -> bytes:
    """Return the content of a chunk, unpacked.

    Raises:
        FormatError: If it is packed in an unknown way, or damaged.
        DatasetNotFoundError: If it is missing.
    """
    with reporting(path):
        data = path.read_bytes()
    if not compression:
        return data
    return unpack(data, path, compression)


def unpack(data: bytes | memoryview, path: AnyPath, compression: str) -> bytes:
    """Return what was compressed.

    Raises:
        FormatError: If it is packed in an unknown way, or damaged.
        MissingExtraError: If zstandard is not installed.
    """
    name = compression.partition(":")[0]
    if name not in ("zstd", "zstandard"):
        raise FormatError(f"{path}: is packed with {compression!r}; only zstd is known here")
    with needs_extra("formats", f"{path}: zst needs zstandard"):
        import zstandard
    try:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    except zstandard.ZstdError as error:
        raise FormatError(f"{path}: {error}") from error


def records(data: bytes, origin: object, start: int = 0) -> Iterator[memoryview]:
    """Yield the records of a chunk from number `start` on.

    Raises:
        FormatError: If its offsets make no sense.
    """
    count = int.from_bytes(data[:4], "little")
    if len(data) < 4 * (count + 2):
        raise FormatError(f"{origin}: {count} records do not fit into {len(data)} bytes")
    edges = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
    if (np.diff(edges) < 0).any() or edges[-1] > len(data):
        raise FormatError(f"{origin}: its offsets do not ascend, or lead beyond its end")
    view = memoryview(data)
    for number in range(start, count):
        yield view[edges[number] : edges[number + 1]]


def fields(record: memoryview, sizes: Sequence[int | None], origin: object) -> list[bytes]:
    """Return the contents of the fields of a record.

    Args:
        record: The record.
        sizes: Bytes of each field; None for those whose size is in the record.
        origin: What messages call the chunk.

    Raises:
        FormatError: If the sizes do not add up to the record.
    """
    count = sum(size is None for size in sizes)
    stated = iter(np.frombuffer(record, "<u4", count).tolist() if count else [])
    position = 4 * count
    contents = []
    for size in sizes:
        length = next(stated) if size is None else size
        contents.append(bytes(record[position : position + length]))
        position += length
    if position != len(record):
        raise FormatError(f"{origin}: a record has {len(record)} bytes, its fields {position}")
    return contents


def stored_picture(content: bytes) -> Any:
    """Return a picture that was stored as three numbers, its mode and its pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(content, "<u4", 3).tolist()
    mode = content[12 : 12 + length].decode()
    return Image.frombytes(mode, (width, height), content[12 + length :])


_MAGIC = b"LDFZ01\0\0"
_HEAD = struct.Struct("<8sHHIII")
_FRAME = struct.Struct("<IIQII")
_VERSION = 1


def litdata_items(
    path: AnyPath, *, compression: str | None, level: str | None, start: int
) -> Iterator[memoryview]:
    """Yield the items of a chunk from number `start` on.

    Args:
        path: The chunk.
        compression: Name of the method; None for none.
        level: "chunk" or None if the whole file is compressed, "batch" for frames of items,
            "sample" for items.
        start: Number of the first item.

    Raises:
        FormatError: If the chunk is damaged.
    """
    if level == "batch":
        yield from _of_frames(path, compression or "zstd", start)
        return
    whole = compression if level in (None, "", "chunk") else None
    for record in records(read_chunk(path, compression=whole), path, start):
        if compression and level == "sample":
            yield memoryview(unpack(record, path, compression))
        else:
            yield record


def _of_frames(path: AnyPath, compression: str, start: int) -> Iterator[memoryview]:
    data = read_chunk(path, compression=None)
    try:
        magic, version, _, num_items, _, num_frames = _HEAD.unpack_from(data)
        edges = np.frombuffer(data, "<u4", num_items + 1, _HEAD.size).astype(np.int64)
        position = _HEAD.size + 4 * (num_items + 1)
        frames = [
            _FRAME.unpack_from(data, position + number * _FRAME.size)
            for number in range(num_frames)
        ]
    except (struct.error, ValueError) as error:
        raise FormatError(f"{path}: is cut off: {error}") from error
    if (magic, version) != (_MAGIC, _VERSION):
        raise FormatError(f"{path}: begins with {data[:10]!r}, wanted {_MAGIC!r}, version 1")
    for first, count, offset, packed, size in frames:
        if first + count <= start:
            continue
        content = memoryview(unpack(data[offset : offset + packed], path, compression))
        if len(content) != size or edges[first + count] - edges[first] != size:
            raise FormatError(f"{path}: items {first} to {first + count} have not {size} bytes")
        for number in range(max(first, start), first + count):
            begin, end = (edges[number : number + 2] - edges[first]).tolist()
            yield content[begin:end]


_CONTAINERS = ("builtins.dict", "builtins.list", "builtins.tuple")


class LitDataSource(PackSource):
    """The items of a dataset, in the order of its chunks. JPEGs stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How the entries of items become parts. Items that are no dicts have the entries
            `0`, `1` and so on.

    Raises:
        FormatError: If the index makes no sense.
        ConfigError: If items hold something that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        path = folder / NAME
        index = read_json_index(folder)
        try:
            config = index["config"]
            self._chunks = [(folder / c["filename"], int(c["chunk_size"])) for c in index["chunks"]]
            self._compression = config["compression"]
            self._level = config.get("compression_level")
            self._shape = _shape(parse_json(config["data_spec"], origin="data_spec")[1])
            formats = list(config["data_format"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError(f"{path}: no index of LitData chunks: {error!r}") from error
        if config.get("encryption"):
            raise ConfigError(f"{folder}: is encrypted; optimize it again without encryption")
        self._decoders = [_litdata_decoder(name, folder) for name in formats]

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for path, count in self._chunks:
            skip = min(max(0, start - number), count)
            number += skip
            if skip == count:
                continue
            for record in litdata_items(
                path, compression=self._compression, level=self._level, start=skip
            ):
                row = self._row(record, path)
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample

    def _row(self, record: memoryview, path: AnyPath) -> dict[str, Any]:
        contents = fields(record, [None] * len(self._decoders), path)
        leaves = iter(
            decode(content) for decode, content in zip(self._decoders, contents, strict=True)
        )
        item = self._shape(leaves)
        if isinstance(item, dict):
            return {str(name): value for name, value in item.items()}
        entries = item if isinstance(item, list) else [item]
        return {str(number): value for number, value in enumerate(entries)}


def _shape(spec: Any) -> Callable[[Iterator[Any]], Any]:
    """Return what puts the leaves of an item together again."""
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


def _litdata_decoder(kind: str, folder: AnyPath) -> Callable[[bytes], Any]:
    name = kind.partition(":")[0]
    if name in _LITDATA_DECODERS:
        return _LITDATA_DECODERS[name]
    try:
        from litdata.streaming.serializers import _SERIALIZERS
    except ImportError as error:
        raise MissingExtraError(
            f"{folder}: items hold a {kind!r}, which only LitData itself can read: "
            "pip install litdata"
        ) from error
    if name not in _SERIALIZERS:
        raise ConfigError(f"{folder}: items hold a {kind!r}, which this LitData does not know")
    serializer = copy(_SERIALIZERS[name])
    serializer.setup(kind)
    decode: Callable[[bytes], Any] = serializer.deserialize
    return decode


_LITDATA_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda content: content.decode("utf-8", "surrogateescape"),
    "string": lambda content: content.decode("utf-8", "surrogateescape"),
    "bool": lambda content: content[0] != 0,
    "int": lambda content: np.frombuffer(content, "<i8")[0].item(),
    "float": lambda content: np.frombuffer(content, "<f8")[0].item(),
    "jpeg": bytes,
    "pil": stored_picture,
}


_SCALARS = {
    "int": "<i8",
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}


class MdsSource(PackSource):
    """The samples of a dataset, in the order of its shards. Pictures stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How columns become parts.

    Raises:
        FormatError: If the index makes no sense.
        ConfigError: If a column has an encoding that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        path = folder / NAME
        index = read_json_index(folder)
        try:
            self.shards = [_MdsShard(folder, about) for about in index["shards"]]
        except (KeyError, TypeError) as error:
            raise FormatError(f"{path}: no index of MDS shards: {error!r}") from error

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for shard in self.shards:
            skip = min(max(0, start - number), shard.num_samples)
            number += skip
            if skip == shard.num_samples:
                continue
            for row in shard.rows(skip):
                sample = self.rules.sample(row, number, str(shard.path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample


class _MdsShard:
    def __init__(self, folder: AnyPath, about: Mapping[str, Any]) -> None:
        if about["format"] != "mds":
            raise ConfigError(f"{folder}: has {about['format']} shards; only MDS is known here")
        self.num_samples = int(about["samples"])
        self.compression = about["compression"]
        file = about["zip_data"] if self.compression else about["raw_data"]
        self.path = folder / file["basename"]
        self.names = list(about["column_names"])
        self.sizes = list(about["column_sizes"])
        self.decoders = [
            _mds_decoder(encoding, name, folder)
            for name, encoding in zip(self.names, about["column_encodings"], strict=True)
        ]

    def rows(self, start: int) -> Iterator[dict[str, Any]]:
        data = read_chunk(self.path, compression=self.compression)
        for record in records(data, self.path, start):
            contents = fields(record, self.sizes, self.path)
            yield {
                name: decode(content)
                for name, decode, content in zip(self.names, self.decoders, contents, strict=True)
            }


def _mds_decoder(encoding: str, name: str, folder: AnyPath) -> Callable[[bytes], Any]:
    if encoding in _SCALARS:
        dtype = _SCALARS[encoding]
        return lambda content: np.frombuffer(content, dtype)[0].item()
    if encoding in _MDS_DECODERS:
        return _MDS_DECODERS[encoding]
    raise ConfigError(
        f"{folder}: column {name!r} is encoded as {encoding!r}, which is not known here; known are "
        f"{', '.join(sorted([*_MDS_DECODERS, *_SCALARS]))}"
    )


_MDS_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda content: content.decode("utf-8", "surrogateescape"),
    "json": partial(parse_json, origin="json"),
    "str_int": lambda content: int(content),
    "str_float": lambda content: float(content),
    "str_decimal": lambda content: content.decode(),
    "jpeg": bytes,
    "png": bytes,
    "pil": stored_picture,
}
