"""Pack a dataset that LitData has optimized: a folder of chunks with an `index.json`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import numpy as np

from energon.errors import ConfigError, FormatError, MissingExtraError
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.prepare.importers.chunks import (
    NAME,
    fields,
    read_chunk,
    read_json_index,
    records,
    stored_picture,
    unpack,
)
from energon.prepare.importers.row import PackSource, RowRules, Wanted, every

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
        self._decoders = [_decoder(name, folder) for name in formats]

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


def _decoder(kind: str, folder: AnyPath) -> Callable[[bytes], Any]:
    name = kind.partition(":")[0]
    if name in _DECODERS:
        return _DECODERS[name]
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


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda content: content.decode("utf-8", "surrogateescape"),
    "string": lambda content: content.decode("utf-8", "surrogateescape"),
    "bool": lambda content: content[0] != 0,
    "int": lambda content: np.frombuffer(content, "<i8")[0].item(),
    "float": lambda content: np.frombuffer(content, "<f8")[0].item(),
    "jpeg": bytes,
    "pil": stored_picture,
}
