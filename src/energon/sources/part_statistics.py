"""How many parts a dataset has, by name, and how large they are. No content is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.formats.meta.info import META
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import SqliteFile, SqliteReader
from energon.io.epath import AnyPath
from energon.samples.crude import find_part
from energon.sources.files.locate import local_copy

_MEDIA = """
WITH media AS (
    SELECT metadata_type AS type, CASE
        WHEN typeof(metadata_json) = 'text' AND json_valid(metadata_json) THEN metadata_json
        ELSE 'null'
    END AS json FROM media_metadata
)
"""


def _number(name: str, *types: str) -> str:
    """Return SQL for a number of the metadata, NULL for anything else and for absurd values."""
    listed = ", ".join(f"'{each}'" for each in types or ("integer", "real"))
    value = f"json_extract(json, '$.{name}')"
    is_number = f"json_type(json, '$.{name}') IN ({listed}) AND {value} BETWEEN 0 AND 1e12"
    return f"CASE WHEN {is_number} THEN {value} END AS {name}"


_FORMAT = "CASE json_type(json, '$.format') WHEN 'text' THEN json_extract(json, '$.format') END"
_IMAGES = f"""{_MEDIA}, images AS (
    SELECT {_number("width", "integer")}, {_number("height", "integer")}, {_FORMAT} AS format
    FROM media WHERE type = 'image'
)
SELECT format, count(*), min(width), sum(width), max(width), min(height), sum(height), max(height)
FROM images WHERE width IS NOT NULL AND height IS NOT NULL GROUP BY 1 ORDER BY 2 DESC
"""
_STREAMS = {
    "video": ("video_duration", "video_num_frames", "video_fps"),
    "audio": ("audio_duration", "audio_num_samples", "audio_sample_rate"),
}
_READABLE = f"{_MEDIA} SELECT count(*) FROM media WHERE type = 'av' AND json_type(json) = 'object'"


def _lasting(seconds: str, units: str, rate: str) -> str:
    """Return the query for the streams of audio and video files that have a `rate`."""
    numbers = ", ".join(map(_number, (seconds, units, rate)))
    return f"""{_MEDIA}, streams AS (SELECT {numbers} FROM media WHERE type = 'av')
SELECT count(*), sum({seconds}), min({seconds}), max({seconds}), sum({units})
FROM streams WHERE {rate} IS NOT NULL
"""


def media_statistics(folder: AnyPath) -> dict[str, Any] | None:
    """Return statistics of the media metadata of a dataset or folder; None if there are none."""
    index = folder / META / "index.sqlite"
    if not index.is_file():
        return None
    with SqliteReader(local_copy(index)) as reader:
        if "media_metadata" not in reader.tables:
            return None
        images = list(reader.rows(_IMAGES))
        count = sum(row[1] for row in images)
        statistics: dict[str, Any] = {}
        if images:
            statistics["images"] = {
                "count": count,
                "formats": {row[0] or "unknown": row[1] for row in images},
                "width": _range(count, *zip(*(row[2:5] for row in images), strict=True)),
                "height": _range(count, *zip(*(row[5:8] for row in images), strict=True)),
            }
        for name, stream in _STREAMS.items():
            streams, seconds, least, most, units = reader.first(_lasting(*stream)) or (0,) * 5
            if streams:
                statistics[name] = {
                    "count": streams,
                    "seconds": round(seconds or 0.0, 3),
                    "shortest": least,
                    "longest": most,
                    "frames" if name == "video" else "samples": units,
                }
        (total,) = reader.first("SELECT count(*) FROM media_metadata") or (0,)
        (readable,) = reader.first(_READABLE) or (0,)
        if total > count + readable:
            statistics["unreadable"] = {"count": total - count - readable}
        return statistics


def _range(
    count: int, least: Sequence[int], sums: Sequence[int], most: Sequence[int]
) -> dict[str, float]:
    return {"min": min(least), "mean": round(sum(sums) / count, 1), "max": max(most)}


NUM_BUCKETS = 64
COUNTED_PARTS = 100_000
_PARTS = "SELECT tar_file_id, part_name, content_byte_size FROM sample_parts"
_SAMPLES = """
SELECT tar_file_id, sum(content_byte_size) FROM sample_parts GROUP BY tar_file_id, sample_index
"""


@dataclass
class SizeStatistics:
    """Sizes of many things.

    Args:
        count: How many there are.
        total: Their total size in bytes.
        smallest: Size of the smallest in bytes.
        largest: Size of the largest in bytes.
        buckets: How many sizes have each number of binary digits: bucket b covers 2^(b-1) up to,
            but not including, 2^b bytes; the first are empty.
    """

    count: int = 0
    total: int = 0
    smallest: int = 0
    largest: int = 0
    buckets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.int64))

    def add(self, sizes: NDArray[Any]) -> None:
        """Count more of them."""
        if not len(sizes):
            return
        low, high = int(sizes.min()), int(sizes.max())
        self.smallest = min(low, self.smallest) if self.count else low
        self.largest = max(high, self.largest)
        self.count += len(sizes)
        self.total += int(sizes.sum(dtype=np.uint64))
        _, digits = np.frexp(sizes.astype(np.float64))
        self.buckets += np.bincount(digits, minlength=NUM_BUCKETS)[:NUM_BUCKETS]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data; the histogram has upper bounds of sizes, and counts."""
        used = np.flatnonzero(self.buckets)
        return {
            "count": self.count,
            "bytes": self.total,
            "mean": round(self.total / max(1, self.count), 1),
            "min": self.smallest,
            "max": self.largest,
            "histogram": [
                {"below": 1 << int(bucket), "count": int(self.buckets[bucket])}
                for bucket in (range(used[0], used[-1] + 1) if len(used) else ())
            ],
        }


@dataclass
class PartStatistics:
    """Sizes of the parts of many samples, by name, and of the samples as a whole."""

    samples: SizeStatistics = field(default_factory=SizeStatistics)
    parts: dict[str, SizeStatistics] = field(default_factory=dict)

    def add(self, table: PartTable) -> None:
        """Count the samples of a shard."""
        sizes = table.part_size
        names = table.part_name
        for number, name in enumerate(table.part_names):
            own = sizes[names == number]
            if len(own):
                self.part(name).add(own)
        if len(sizes):
            sums = np.add.reduceat(sizes, table.first_part[:-1].astype(np.int64))
            self.samples.add(sums)

    def part(self, name: str) -> SizeStatistics:
        """Return the statistics of a part, under the spelling that came first."""
        return self.parts.setdefault(find_part(self.parts, name) or name, SizeStatistics())

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        parts = sorted(self.parts.items(), key=lambda item: -item[1].total)
        return {
            "sample_sizes": self.samples.to_json(),
            "parts": {name: statistics.to_json() for name, statistics in parts},
        }


def index_statistics(index: SqliteFile, shards: Collection[int]) -> PartStatistics | None:
    """Return the statistics of some shards from `index.sqlite`, as other tools write it.

    Args:
        index: The file.
        shards: Numbers of the shards to count.

    Returns:
        None if the index is an early one, which does not list parts.
    """
    statistics = PartStatistics()
    with SqliteReader(index) as reader:
        if "sample_parts" not in reader.tables:
            return None
        parts = reader.rows(_PARTS)
        while rows := list(islice(parts, COUNTED_PARTS)):
            sizes: defaultdict[str, list[int]] = defaultdict(list)
            for shard, name, size in rows:
                if shard in shards:
                    sizes[reader.text(name)].append(size)
            for name, own in sizes.items():
                statistics.part(name).add(_sizes(reader, own))
        parts = reader.rows(_SAMPLES)
        while rows := list(islice(parts, COUNTED_PARTS)):
            own = [size for shard, size in rows if shard in shards]
            statistics.samples.add(_sizes(reader, own))
    return statistics


def _sizes(reader: SqliteReader, values: list[int]) -> NDArray[np.int64]:
    return np.array(reader.numbers(*values), np.int64)
