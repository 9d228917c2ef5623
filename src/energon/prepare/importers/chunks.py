"""Pack chunks of MosaicML Streaming (MDS) and of LitData."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from energon.formats.chunks.litdata import LitDataFormat
from energon.formats.chunks.mds import MdsFormat
from energon.formats.chunks.records import CHUNK_INDEX, ChunkFormat
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.io.files import read_document
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, RowRules, Selects, every
from energon.utf8 import decode_utf8

FORMATS: dict[str, Callable[[Any, str], ChunkFormat]] = {"mds": MdsFormat, "litdata": LitDataFormat}


class ChunkFolderSource(PackSource):
    """The samples of a dataset, in the order of its chunks. Images stay encoded as they are.

    Args:
        kind: One of `FORMATS`.
        folder: The folder with `index.json`.
        rules: How columns or entries become parts. Items that are not dicts have the entries `0`,
            `1` and so on.

    Raises:
        FormatError: If the index is invalid.
        StorageError: If it cannot be read.
        ConfigError: If samples have something that is not known.
    """

    def __init__(self, kind: str, folder: AnyPath, rules: RowRules) -> None:
        self.folder = folder
        self.rules = rules
        path = folder / CHUNK_INDEX
        with reporting(path):
            text = decode_utf8(read_document(path), origin=str(path))
        index = parse_json(text, origin=str(path), hint="copy the folder again, or write it again")
        self.format: ChunkFormat = FORMATS[kind](index, str(path))

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        number = 0
        for at, chunk in enumerate(self.format.chunks):
            path = self.folder / chunk.name
            skip = min(max(0, start - number), chunk.num_records)
            number += skip
            if skip == chunk.num_records:
                continue
            with reporting(path):
                data = path.read_bytes()
            for record in self.format.records(at, data, path, skip):
                row = self.format.row(at, record, path)
                sample = self.rules.sample(row, number, str(path))
                number += 1
                if sample is not None and is_selected(sample["__key__"], row):
                    yield sample
