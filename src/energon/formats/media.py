"""Recognize image, audio and video files and describe them without decoding.

The first bytes of a file identify it. Headers of MP4 files also claim a number of packets: if all
packets have one size, the number is all that is stored, so a kilobyte can claim billions, and
decoders create an index entry for each.

Metadata are stored in `index.sqlite` as compact JSON without nulls, beside the type of the file.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import IO, Any, ClassVar, NamedTuple, Self

from energon.errors import DecodeError, FormatError
from energon.formats.text import parse_json

SIGNATURE_BYTES = 392
"""Transport streams are known by the first bytes of their packets, of which this has three."""

_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
_SIGNATURES = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"\0\0\1\0": "ico",
    b"\0\0\0\x0cjP  ": "jp2",
    b"\xff\x4f\xff\x51": "j2k",
    _EBML: "mkv",
    b"FLV\x01": "flv",
    b"\0\0\1\xba": "mpg",
    b"\0\0\1\xb3": "mpg",
    b"fLaC\0": "flac",
    b"fLaC\x80": "flac",
    b"OggS\0": "ogg",
    b"\xff\xfb": "mp3",
    b"\xff\xfa": "mp3",
    b"\xff\xf3": "mp3",
    b"\xff\xf2": "mp3",
    b"\xff\xf1": "aac",
    b"\xff\xf9": "aac",
}
_RIFF = {b"WEBP": "webp", b"AVI ": "avi", b"WAVE": "wav"}
_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": None, b"heix": None, b"mif1": None}


def guess_extension(data: bytes) -> str | None:
    """Return the extension of the image, audio or video file in `data`, or None.

    Text is never taken for such a file.

    Example:
        >>> guess_extension(b"RIFF....WEBPVP8 ")
        'webp'
    """
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]))
    if data[:4] == b"FORM":
        return "aiff" if data[8:12] in (b"AIFF", b"AIFC") else None
    if data[4:8] == b"ftyp":
        return _BRANDS.get(bytes(data[8:12]), "mp4")
    # Text may begin with these letters, but has no zero bytes and no control characters.
    if data[:2] == b"BM":
        return "bmp" if data[6:10] == bytes(4) else None
    for extension, at in (("ts", 0), ("m2ts", 4)):
        step = 188 + at
        # The first packet has no options, so its fourth byte is a control character.
        if all(data[n : n + 1] == b"G" for n in range(at, at + 3 * step, step)):
            return extension if 0x10 <= data[at + 3] < 0x20 else None
    if data[:3] == b"ID3":
        return "mp3" if data[3:4] < b"\x08" and len(data) > 3 else None
    return next((name for start, name in _SIGNATURES.items() if data.startswith(start)), None)


_FIRST_BYTES = 64 << 10
_FIRST_BOXES = frozenset(
    {b"ftyp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"styp", b"sidx", b"pnot"}
)
_TABLES = re.compile(rb"stsz|trun")
_HAS_FIELDS = 0x000F00
"""Flags of a run of packets whose packets have individual fields."""
_MAX_COMPRESSED_HEADER = 64 << 20


class Piece(NamedTuple):
    """Some bytes of a file."""

    start: int
    content: bytes


def read_headers(stream: IO[bytes]) -> list[Piece]:
    """Return the beginning of a file, and for an MP4 the boxes around its media.

    Args:
        stream: The file. If it is not in memory, nothing after the header is read.

    Raises:
        DecodeError: If the header is truncated, which decoders take for one with fewer tracks.
    """
    stream.seek(0)
    first = stream.read(_FIRST_BYTES)
    pieces = [Piece(0, first)]
    end = stream.seek(0, os.SEEK_END)
    for position, kind, size in _boxes(stream, first, end):
        if kind == b"moov" and position + size > end:
            raise DecodeError(f"the file has {end} bytes, but its header ends at {position + size}")
        if kind not in (b"mdat", b"free", b"skip", b"wide"):
            stream.seek(position)
            pieces.append(Piece(position, stream.read(min(size, end - position))))
        if kind == b"moov" and not isinstance(stream, io.BytesIO):
            break
    return pieces


def _boxes(stream: IO[bytes], first: bytes, end: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield position, name and size of the outermost boxes of an MP4 file.

    Args:
        stream: The file.
        first: Its first bytes.
        end: How many bytes it has.
    """
    position = 0
    while position + 8 <= end and first[4:8] in _FIRST_BOXES:
        start = first[position : position + 16]
        if len(start) < 16:
            stream.seek(position)
            start = stream.read(16)
        size, head = int.from_bytes(start[:4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(start[8:16], "big"), 16
        if size < head:
            size = end - position
        yield position, start[4:8], size
        position += size


def count_missing_bytes(stream: IO[bytes], *, after_header: bool = True) -> int:
    """Return how many bytes a file lacks at its end, by the sizes that it states.

    Only MP4, Matroska, AVI and WAV state sizes, and not if they were written to a pipe.

    Args:
        stream: The file.
        after_header: Whether to look at all boxes of an MP4 file, each of which takes a read, or
            only at those up to the first one of media after its header.
    """
    stream.seek(0)
    first = stream.read(_FIRST_BYTES)
    end = stated = stream.seek(0, os.SEEK_END)
    if first[:4] == b"RIFF":
        size = int.from_bytes(first[4:8], "little")
        # A file that is being streamed says 0 or 2^32 - 1, and many lack the byte that pads.
        stated = size + 8 if end + 1 < size + 8 < 1 << 32 else end
    elif first[:4] == _EBML:
        stated = _end_of_segment(first) or end
    has_header = False
    for position, kind, size in _boxes(stream, first, end):
        stated = max(end, position + size)
        if has_header and not after_header and kind in (b"mdat", b"moof"):
            break
        has_header = has_header or kind == b"moov"
    return max(0, stated - end)


def _end_of_segment(first: bytes) -> int | None:
    """Return where the segment of a Matroska file ends, None if it does not say that."""
    header = _ebml_size(first, len(_EBML))
    if header is None or first[sum(header) :][: len(_SEGMENT)] != _SEGMENT:
        return None
    segment = _ebml_size(first, sum(header) + len(_SEGMENT))
    return None if segment is None else sum(segment)


def _ebml_size(data: bytes, position: int) -> tuple[int, int] | None:
    """Return where an element begins and how long it is, None if its size is unknown."""
    length = 9 - (data[position] if position < len(data) else 0).bit_length()
    value = int.from_bytes(data[position : position + length], "big") ^ 1 << 7 * length
    is_known = length < 9 and position + length <= len(data) and value != (1 << 7 * length) - 1
    return (position + length, value) if is_known else None


def count_claimed_packets(header: bytes) -> int:
    """Return how many packets the tracks and runs in a box claim without a size for each.

    Tables are found by name wherever they are, as decoders find them in boxes of many kinds.
    """
    contents = (header, *_unpacked(header))
    return sum(_claims_of_track(track) for content in contents for track in content.split(b"trak"))


def _unpacked(content: bytes) -> Iterator[bytes]:
    """Yield headers that old files store compressed inside others."""
    for match in re.finditer(rb"cmvd", content):
        try:
            packed = content[match.end() + 4 :]
            yield zlib.decompressobj().decompress(packed, _MAX_COMPRESSED_HEADER)
        except zlib.error:
            continue


def _claims_of_track(track: bytes) -> int:
    total = 0
    is_pcm = _is_pcm(track)
    for match in _TABLES.finditer(track):
        fields = track[match.end() : match.end() + 12]
        if len(fields) < 12 or int.from_bytes(track[match.start() - 4 : match.start()], "big") < 16:
            continue
        flags, first, second = struct.unpack(">III", fields)
        if match[0] == b"stsz":
            # Version and flags, size of each packet or 0, number of packets.
            total += second if first and not is_pcm else 0
        else:
            # Version and flags, number of packets.
            total += first if not flags & _HAS_FIELDS else 0
    return total


def _is_pcm(track: bytes) -> bool:
    """Return whether each packet is one sample of PCM audio, which decoders read in bulk."""
    times = [track[match.end() : match.end() + 16] for match in re.finditer(rb"stts", track)]
    return (
        bool(times)
        and b"soun" in track
        and b"vide" not in track
        and all(time[4:8] == b"\0\0\0\1" and time[12:16] == b"\0\0\0\1" for time in times)
    )


class MediaMetadataType(StrEnum):
    """The type of a media file."""

    AV = "av"
    IMAGE = "image"


class MediaMetadataBase:
    """The metadata of a media file."""

    __slots__ = ()
    metadata_type: ClassVar[MediaMetadataType]

    def to_dict(self) -> dict[str, Any]:
        """Return the known fields as a dict."""
        values = asdict(self)  # type: ignore[call-overload]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any]) -> Self:
        """Return the metadata from the result of `to_dict`, ignoring fields of later versions."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in payload.items() if name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMetadata(MediaMetadataBase):
    """Metadata of an image: size in pixels, and Pillow's names of the file format and the channels.

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
    """An audio or video file. Fields that do not apply or are unknown are None.

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
    """Return metadata of a type from their JSON, ignoring fields of later versions.

    Raises:
        FormatError: If the type is unknown, or does not match the text.
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
