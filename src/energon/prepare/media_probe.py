"""Look at media files without decoding them: only what their headers say is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from energon.decode.av import AVDecoder
from energon.errors import DecodeError, MissingExtraError
from energon.formats.media import ImageMetadata, MediaMetadata
from energon.formats.media_table import Job
from energon.formats.part_table_file import open_part_table
from energon.formats.signature import SIGNATURE_BYTES
from energon.io.address import join_address
from energon.io.local import OpenFile
from energon.io.range_file import RangeFile, RemoteFile
from energon.io.range_stream import open_range
from energon.prepare.files import file_state, reporting
from energon.prepare.media_filter import MediaFilter


class Probed(NamedTuple):
    """What was found of a job."""

    job: Job
    found: list[tuple[str, MediaMetadata]]
    """File names and metadata."""
    failed: list[tuple[str, str]]
    """Names of files that are damaged, and how."""


def probe_shards(
    dataset: str, shards: Sequence[str], chosen: MediaFilter, contents: str | None = None
) -> list[Probed]:
    """Return the metadata of the media files in some shards.

    Args:
        dataset: The folder that has their part tables.
        shards: Paths below it.
        chosen: Which files.
        contents: Where the shards are, if the folder only stands for a remote one.

    Raises:
        DatasetNotFoundError: If a shard is missing.
        FormatError: If its index is damaged.
        MissingExtraError: If there is audio or video, and PyAV is not installed.
    """
    return [_probe_shard(Path(dataset), shard, chosen, contents) for shard in shards]


def probe_files(
    folder: str, names: Sequence[str], chosen: MediaFilter, contents: None = None
) -> list[Probed]:
    """Return the metadata of some files in a folder; see `probe_shards`."""
    return [_probe_file(Path(folder), name, chosen) for name in names]


def probe_stream(stream: IO[bytes], name: str, chosen: MediaFilter) -> MediaMetadata | None:
    """Return the metadata of a file, or None if it is no media file.

    Raises:
        DecodeError: If it is damaged.
        MissingExtraError: If it is audio or video, and PyAV is not installed.
    """
    kind = chosen.kind(name, lambda: stream.read(SIGNATURE_BYTES))
    stream.seek(0)
    return None if kind is None else _METADATA[kind](stream)


def _probe_shard(dataset: Path, shard: str, chosen: MediaFilter, contents: str | None) -> Probed:
    path = dataset / shard
    state = file_state(path)
    with reporting(path):
        table = open_part_table(path)
        file: RangeFile = (
            OpenFile(str(path)) if contents is None else RemoteFile(join_address(contents, shard))
        )
    streams = []
    for sample, key in enumerate(table.keys(np.arange(table.num_samples))):
        for part, offset, size in table.sample_parts(sample):
            if chosen.may_match(f"{key}.{part}"):
                streams.append((f"{key}.{part}", offset, size))
    found, failed = _probe_all(
        ((name, open_range(file, offset, size)) for name, offset, size in streams), chosen
    )
    return Probed(Job(shard, *state), found, failed)


def _probe_file(folder: Path, name: str, chosen: MediaFilter) -> Probed:
    path = folder / name
    state = file_state(path)
    with reporting(path), open(path, "rb") as stream:
        found, failed = _probe_all([(name, stream)], chosen)
    return Probed(Job(name, *state), found, failed)


def _probe_all(
    streams: Iterable[tuple[str, IO[bytes]]], chosen: MediaFilter
) -> tuple[list[tuple[str, MediaMetadata]], list[tuple[str, str]]]:
    found, failed = [], []
    for name, stream in streams:
        try:
            metadata = probe_stream(stream, name, chosen)
        except MissingExtraError:
            raise
        except Exception as error:
            # Decoders raise anything on bytes that somebody has broken on purpose.
            failed.append((name, f"{type(error).__name__}: {error}"))
            continue
        if metadata is not None:
            found.append((name, metadata))
    return found, failed


def _image_metadata(stream: IO[bytes]) -> ImageMetadata:
    from PIL import Image

    with warnings.catch_warnings():
        # Nothing is unpacked here, so the size of the image does no harm.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(stream) as image:
            if image.format is None:
                raise DecodeError("the image has no known format")
            return ImageMetadata(
                width=image.width, height=image.height, format=image.format, mode=image.mode
            )


def _av_metadata(stream: IO[bytes]) -> MediaMetadata:
    return AVDecoder(stream).get_metadata(get_audio_num_samples=True)


_METADATA = {"image": _image_metadata, "av": _av_metadata}
