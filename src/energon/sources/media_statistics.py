"""How many media files a dataset has, how large they are and how long they last."""

from __future__ import annotations

from typing import Any

from energon.formats.meta.info import META
from energon.formats.tables.sqlite_file import SqliteReader
from energon.io.epath import AnyPath
from energon.sources.files.locate import local_copy

_IMAGES = """
SELECT count(*), min(width), avg(width), max(width), min(height), avg(height), max(height) FROM (
    SELECT
        json_extract(metadata_json, '$.width') AS width,
        json_extract(metadata_json, '$.height') AS height
    FROM media_metadata WHERE metadata_type = 'image'
)
"""
_FORMATS = """
SELECT json_extract(metadata_json, '$.format'), count(*) FROM media_metadata
WHERE metadata_type = 'image' GROUP BY 1 ORDER BY 2 DESC
"""
_LASTING = """
SELECT count(*), sum(seconds), min(seconds), max(seconds), sum(units) FROM (
    SELECT json_extract(metadata_json, ?) AS seconds, json_extract(metadata_json, ?) AS units
    FROM media_metadata
    WHERE metadata_type = 'av' AND json_extract(metadata_json, ?) IS NOT NULL
)
"""
_STREAMS = {
    "video": ("$.video_duration", "$.video_num_frames", "$.video_fps"),
    "audio": ("$.audio_duration", "$.audio_num_samples", "$.audio_sample_rate"),
}


def media_statistics(folder: AnyPath) -> dict[str, Any] | None:
    """Return statistics of the media metadata of a dataset or folder; None if there are none."""
    index = folder / META / "index.sqlite"
    if not index.is_file():
        return None
    with SqliteReader(local_copy(index)) as reader:
        if "media_metadata" not in reader.tables:
            return None
        count, *sizes = reader.first(_IMAGES) or (0,)
        found: dict[str, Any] = {}
        if count:
            found["images"] = {
                "count": count,
                "formats": dict(reader.rows(_FORMATS)),
                "width": _range(*sizes[:3]),
                "height": _range(*sizes[3:]),
            }
        for name, paths in _STREAMS.items():
            count, *lengths = reader.first(_LASTING, paths) or (0,)
            if count:
                seconds, least, most, units = lengths
                found[name] = {
                    "count": count,
                    "seconds": round(seconds or 0.0, 3),
                    "shortest": least,
                    "longest": most,
                    "frames" if name == "video" else "samples": units,
                }
        return found


def _range(least: int, mean: float, most: int) -> dict[str, float]:
    return {"min": least, "mean": round(mean, 1), "max": most}
