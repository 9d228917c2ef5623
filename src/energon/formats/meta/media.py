"""Media metadata: what is known of an image, audio or video file without decoding it.

Stored in `index.sqlite` as compact JSON without nulls, beside the type of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Self

from energon.errors import FormatError
from energon.formats.json_text import parse_json


class MediaMetadataType(StrEnum):
    """What a file is."""

    AV = "av"
    IMAGE = "image"


class MediaMetadataBase:
    """What is known of a media file."""

    __slots__ = ()
    metadata_type: ClassVar[MediaMetadataType]

    def to_dict(self) -> dict[str, Any]:
        """Return what is known, without what is not."""
        known = asdict(self)  # type: ignore[call-overload]
        return {name: value for name, value in known.items() if value is not None}

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any]) -> Self:
        """Return what `to_dict` was called for. Fields of later versions are ignored."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in payload.items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMetadata(MediaMetadataBase):
    """An image: pixels, Pillow's name of the file format, and of the channels.

    Example:
        >>> ImageMetadata(width=32, height=24, format="PNG", mode="RGB").to_dict()
        {'width': 32, 'height': 24, 'format': 'PNG', 'mode': 'RGB'}
    """

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.IMAGE
    width: int
    height: int
    format: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AVMetadata(MediaMetadataBase):
    """An audio or video file. What does not apply or is not known is None.

    Durations are in seconds; the number of samples is that of one channel.

    Example:
        >>> from pathlib import Path
        >>> from energon import AVDecoder
        >>> metadata = AVDecoder(Path("clip.mp4").read_bytes()).get_metadata()
        >>> metadata.video_width, metadata.video_num_frames, metadata.audio_sample_rate
        (32, 20, 8000)
    """

    metadata_type: ClassVar[MediaMetadataType] = MediaMetadataType.AV
    video_duration: float | None = None
    video_num_frames: int | None = None
    video_fps: float | None = None
    video_width: int | None = None
    video_height: int | None = None
    audio_duration: float | None = None
    audio_channels: int | None = None
    audio_sample_rate: int | None = None
    audio_num_samples: int | None = None


MediaMetadata = ImageMetadata | AVMetadata

_CLASSES: dict[MediaMetadataType, type[ImageMetadata] | type[AVMetadata]] = {
    MediaMetadataType.AV: AVMetadata,
    MediaMetadataType.IMAGE: ImageMetadata,
}


def serialize_media_metadata(metadata: MediaMetadata) -> tuple[MediaMetadataType, str]:
    """Return the type of `metadata` and their JSON.

    Example:
        >>> serialize_media_metadata(AVMetadata(audio_channels=2))[1]
        '{"audio_channels":2}'
    """
    return metadata.metadata_type, json.dumps(metadata.to_dict(), separators=(",", ":"))


def deserialize_media_metadata(metadata_type: str, metadata_json: str) -> MediaMetadata:
    """Return the metadata of a type that their JSON holds. Fields of later versions are ignored.

    Raises:
        FormatError: If the type is unknown, or the text does not fit it.
    """
    try:
        cls = _CLASSES[MediaMetadataType(metadata_type)]
        values: dict[str, Any] = parse_json(metadata_json, origin="JSON")
        return cls.from_dict(values)
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(
            f"media metadata of type {metadata_type!r}: {metadata_json[:80]!r}: {error}; run "
            "`energon prepare-media` again"
        ) from error
