"""Shards of MosaicML Streaming, as its library writes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import zstandard


def write_mds(
    folder: Path,
    shards: Sequence[Sequence[bytes]],
    *,
    column: str = "text",
    encoding: str = "str",
    compressed: bool = False,
) -> Path:
    """Write a dataset with a shard for each list of values of its only column."""
    folder.mkdir(exist_ok=True)
    listed = []
    for number, values in enumerate(shards):
        records = [struct.pack("<I", len(value)) + value for value in values]
        edges = list(accumulate(map(len, records), initial=4 * (len(records) + 2)))
        data = struct.pack(f"<{1 + len(edges)}I", len(records), *edges) + b"".join(records)
        file = {"basename": f"shard.{number:05}.mds", "bytes": len(data), "hashes": {}}
        about = {"format": "mds", "version": 2, "samples": len(records), "raw_data": file}
        about |= {"column_names": [column], "column_encodings": [encoding], "column_sizes": [None]}
        if compressed:
            data = zstandard.ZstdCompressor().compress(data)
            file = {**file, "basename": f"{file['basename']}.zstd", "bytes": len(data)}
        (folder / file["basename"]).write_bytes(data)
        compression = "zstd" if compressed else None
        listed.append(
            about | {"compression": compression, "zip_data": file if compressed else None}
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder
