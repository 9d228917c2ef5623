"""Pack chunks of MosaicML Streaming (MDS) and of LitData."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from energon.formats.chunks.litdata import litdata_decoder, litdata_items, parse_litdata_index
from energon.formats.chunks.mds import MdsShard, mds_decoder, parse_mds_index
from energon.formats.chunks.records import INDEX, fields, records, unpack
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.io.files import read_document
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, RowRules, Wanted, every
from energon.utf8 import decode_utf8


def read_json_index(folder: AnyPath) -> Any:
    """Return what the index of a folder of chunks says.

    Raises:
        FormatError: If it is not JSON.
        StorageError: If it cannot be read.
    """
    path = folder / INDEX
    with reporting(path):
        text = decode_utf8(read_document(path), origin=str(path))
    return parse_json(text, origin=str(path), hint="copy the folder again, or write it again")


class MdsSource(PackSource):
    """The samples of a dataset, in the order of its shards. Images stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How columns become parts.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If a column has an encoding that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        self.shards = parse_mds_index(read_json_index(folder), origin=str(folder / INDEX))
        for shard in self.shards:
            self._decoders(shard)

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for shard in self.shards:
            path = self.folder / shard.name
            skip = min(max(0, start - number), shard.count)
            number += skip
            if skip == shard.count:
                continue
            for row in self._rows(shard, skip):
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample

    def _rows(self, shard: MdsShard, start: int) -> Iterator[dict[str, Any]]:
        path = self.folder / shard.name
        with reporting(path):
            data = path.read_bytes()
        if shard.compression:
            data = unpack(data, path, shard.compression)
        decoders = self._decoders(shard)
        for record in records(data, path, start):
            contents = fields(record, shard.sizes, path)
            yield {
                name: decode(content)
                for name, decode, content in zip(shard.names, decoders, contents, strict=True)
            }

    def _decoders(self, shard: MdsShard) -> list[Any]:
        columns = zip(shard.encodings, shard.names, strict=True)
        return [mds_decoder(encoding, name, self.folder) for encoding, name in columns]


class LitDataSource(PackSource):
    """The items of a dataset, in the order of its chunks. JPEGs stay encoded as they are.

    Args:
        folder: The folder with `index.json`.
        rules: How the entries of items become parts. Items that are not dicts have the entries
            `0`, `1` and so on.

    Raises:
        FormatError: If the index is invalid.
        ConfigError: If items hold something that is not known.
    """

    def __init__(self, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        self._index = parse_litdata_index(read_json_index(folder), origin=str(folder / INDEX))
        self._decoders = [litdata_decoder(kind, folder) for kind in self._index.formats]

    def samples(
        self, split: str, start: int = 0, wanted: Wanted = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for name, count, _ in self._index.chunks:
            path = self.folder / name
            skip = min(max(0, start - number), count)
            number += skip
            if skip == count:
                continue
            with reporting(path):
                data = path.read_bytes()
            index = self._index
            for record in litdata_items(
                data, path, compression=index.compression, level=index.level, start=skip
            ):
                row = self._row(record, path)
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and wanted(sample["__key__"], row):
                    yield sample

    def _row(self, record: memoryview, path: AnyPath) -> dict[str, Any]:
        contents = fields(record, [None] * len(self._decoders), path)
        leaves = zip(self._decoders, contents, strict=True)
        return self._index.item([decode(content) for decode, content in leaves])
