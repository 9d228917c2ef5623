"""What is known about a part without decoding it: its kind, its size in pixels, its duration."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from energon.decode.av_container import AUDIO_EXTENSIONS, AV_EXTENSIONS
from energon.decode.images import IMAGE_EXTENSIONS, image_metadata
from energon.errors import DecodeError
from energon.formats.media import SIGNATURE_BYTES, AVMetadata, guess_extension
from energon.sources.browse.tree import BrowsedFile

MAX_MEASURED_TEXT = 4 << 20

TEXT = frozenset(
    {
        *("txt", "text", "transcript", "md", "csv", "tsv", "srt", "vtt", "yaml", "yml", "toml"),
        *("html", "htm", "xhtml", "xml", "svg", "py", "js", "css", "tex", "log", "caption"),
        *("cls", "cls2", "index", "inx", "id", "count"),
    }
)
VALUES = frozenset({"json", "jsn", "mp", "msg", "cbor"})
ARRAYS = frozenset({"npy", "npz", "ten", "tb"})

PartKind = Literal["image", "audio", "video", "text", "value", "arrays", "bytes"]

FACTS: dict[PartKind, tuple[str, ...]] = {
    "image": ("width", "height", "ratio"),
    "video": ("duration", "width", "height", "fps"),
    "audio": ("duration", "rate"),
    "text": ("length",),
    "arrays": ("length",),
}
"""What can be asked about each kind of part: pixels, seconds, characters, entries."""


def part_kind(extension: str) -> PartKind:
    """Return how a part is shown."""
    if extension in IMAGE_EXTENSIONS:
        return "image"
    if extension in AV_EXTENSIONS:
        return "audio" if extension in AUDIO_EXTENSIONS else "video"
    if extension in TEXT:
        return "text"
    if extension in VALUES:
        return "value"
    return "arrays" if extension in ARRAYS else "bytes"


def part_extension(name: str, file: BrowsedFile | None = None) -> str:
    """Return the extension of a part; if it is unknown, the type that its first bytes suggest."""
    extension = name.lower().removesuffix(".gz").rpartition(".")[2]
    if part_kind(extension) == "bytes" and file is not None and file.size:
        head = file.find().pread(file.offset, min(file.size, SIGNATURE_BYTES))
        return guess_extension(head) or extension
    return extension


def part_facts(name: str, file: BrowsedFile) -> dict[str, float]:
    """Return numbers about a part by their names in `FACTS`; {} if its kind has none.

    Reads headers of media and arrays, and whole texts.

    Raises:
        DecodeError: If the part is damaged.
        MissingExtraError: If it is audio or video, and PyAV is not installed.
    """
    kind = part_kind(part_extension(name, file))
    if name.lower().endswith(".gz"):
        return {}
    if kind == "image":
        width, height = _image_size(file)
        return {"width": width, "height": height, "ratio": round(width / max(1, height), 4)}
    if kind in ("audio", "video"):
        return _av_facts(file)
    if kind == "text" and file.size <= MAX_MEASURED_TEXT:
        return {"length": len(file.read().decode("utf-8", "replace"))}
    if name.lower().endswith("npy"):
        shape, _ = npy_header(file)
        return {"length": shape[0]} if shape else {}
    return {}


def npy_header(file: BrowsedFile) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of the array in an `npy` file, without reading its values.

    Raises:
        DecodeError: If the file is damaged.
    """
    with file.open() as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(stream)
        except (ValueError, KeyError, OSError, EOFError) as error:
            raise DecodeError(f"not a readable array: {error}") from error
    return shape, dtype


def _image_size(file: BrowsedFile) -> tuple[int, int]:
    with file.open() as stream:
        try:
            metadata = image_metadata(stream)
        except Exception as error:  # Pillow raises whatever the data make it
            raise DecodeError(f"not a readable image: {error}".partition(" <")[0]) from error
    return metadata.width, metadata.height


def av_metadata(file: BrowsedFile) -> AVMetadata:
    """Return size, rates and duration of a video or a sound, without counting frames."""
    from energon.decode.av import AVDecoder

    with file.open() as stream:
        return AVDecoder(stream, suppress_warnings=True).get_metadata(get_video_frame_count=False)


def _av_facts(file: BrowsedFile) -> dict[str, float]:
    metadata = av_metadata(file)
    facts: dict[str, Any] = {
        "duration": metadata.video_duration or metadata.audio_duration,
        "width": metadata.video_width,
        "height": metadata.video_height,
        "fps": metadata.video_fps,
        "rate": metadata.audio_sample_rate,
    }
    return {name: value for name, value in facts.items() if value is not None}
