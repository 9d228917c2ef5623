"""Pack a dataset of MosaicML Streaming: a folder of MDS shards with an `index.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from energon.errors import ConfigError, FormatError
from energon.formats.json_text import parse_json
from energon.io.epath import AnyPath
from energon.prepare.importers.chunks import (
    NAME,
    fields,
    read_chunk,
    read_json_index,
    records,
    stored_picture,
)
from energon.prepare.importers.row import PackSource, RowRules, Wanted, every

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
            _decoder(encoding, name, folder)
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


def _decoder(encoding: str, name: str, folder: AnyPath) -> Callable[[bytes], Any]:
    if encoding in _SCALARS:
        dtype = _SCALARS[encoding]
        return lambda content: np.frombuffer(content, dtype)[0].item()
    if encoding in _DECODERS:
        return _DECODERS[encoding]
    raise ConfigError(
        f"{folder}: column {name!r} is encoded as {encoding!r}, which is not known here; known are "
        f"{', '.join(sorted([*_DECODERS, *_SCALARS]))}"
    )


_DECODERS: dict[str, Callable[[bytes], Any]] = {
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
