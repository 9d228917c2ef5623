"""Inspect media files without decoding them: only their headers are read.

They are the parts of shards, or the files of a folder on this machine or in an object store.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

from energon.decode.av import AVDecoder
from energon.decode.av_container import AV_EXTENSIONS, check_size
from energon.decode.images import IMAGE_EXTENSIONS, image_metadata
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DecodeError,
    MissingExtraError,
    ObjectChangedError,
    StorageError,
)
from energon.formats.media import (
    SIGNATURE_BYTES,
    AVMetadata,
    MediaMetadata,
    guess_extension,
)
from energon.formats.tables.media_table import MediaJob, Strategy
from energon.formats.tables.part_table_file import open_part_table
from energon.io.address import is_remote, join_address
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile
from energon.io.files import open_store
from energon.io.range_file import REMOTE_BUFFER_BYTES, RangeFile, RawReader, RemoteFile, open_range
from energon.local_file import open_binary
from energon.messages import describe_error
from energon.prepare.crash_isolation import note
from energon.prepare.files import file_state, list_dataset_files, reporting

MEDIA_HEAD_BYTES = 64 << 10
"""How much of a remote file is fetched first: enough for the headers of nearly all images."""


@dataclass(frozen=True)
class FolderFiles:
    """Files by their paths below a folder, on this machine or in an object store.

    Args:
        address: The folder.
        listed: Each file as it was when the folder was listed, by path.
    """

    address: str
    listed: Mapping[str, ObjectInfo]

    @classmethod
    def of(cls, folder: Path) -> FolderFiles:
        """Return the files of a folder on this machine.

        Raises:
            DatasetNotFoundError: If there is no such folder.
        """
        states = {name: file_state(folder / name) for name in list_dataset_files(folder)}
        listed = {
            name: ObjectInfo(name, state.size, None, state.mtime_ns)
            for name, state in states.items()
        }
        return cls(str(folder), listed)

    def names(self) -> list[str]:
        """Return all paths, sorted."""
        return sorted(self.listed)

    def job(self, name: str) -> MediaJob:
        """Return a file as it was when the folder was listed."""
        return MediaJob(name, self.listed[name].size, self.listed[name].mtime_ns)

    def only(self, names: Sequence[str]) -> FolderFiles:
        """Return these files only, for a job in a different process: the list may be long."""
        return FolderFiles(self.address, {name: self.listed[name] for name in names})

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order. Each is closed when the next one is requested.

        The first bytes of files in a store are requested together.
        """
        if is_remote(self.address):
            store, _ = open_store(self.address)
            yield from store.together(self._open, [(name,) for name in names])
            return
        for name in names:
            path = Path(self.address, name)
            with reporting(path), open_binary(path) as stream:
                yield stream

    def _open(self, name: str) -> IO[bytes]:
        address = join_address(self.address, name)
        info = self.listed[name]._replace(key=open_store(address)[1])
        file = RemoteFile(address, info=info)
        try:
            head = file.pread(0, min(MEDIA_HEAD_BYTES, info.size))
        except (DatasetNotFoundError, ObjectChangedError):
            head = b""  # raised again, for this file alone, when it is read

        def read(start: int, stop: int) -> bytes:
            return head[start:stop] if start < len(head) else file.pread(start, stop - start)

        return io.BufferedReader(RawReader(read, info.size, file.path), REMOTE_BUFFER_BYTES)


MediaKind = Literal["image", "av"]


@dataclass(frozen=True)
class MediaFilter:
    """How to recognize media files.

    Args:
        strategy: "EXTENSION" by their names, "HEADER" by their first bytes (and by name if these do
            not tell), "GLOB" by patterns for their names.
        patterns: For "GLOB": patterns separated by commas, in which * matches any text.

    Raises:
        ConfigError: If patterns are missing, or given for another strategy.
    """

    strategy: Strategy
    patterns: str | None = None

    def __post_init__(self) -> None:
        if (self.strategy == "GLOB") != bool(self.patterns):
            raise ConfigError(
                f"media filter {self.strategy} with patterns {self.patterns!r}: GLOB, and nothing "
                'else, needs patterns like "*.jpg,*.mp4"'
            )

    def may_match(self, name: str) -> bool:
        """Return whether a file must be read, judging by its name alone."""
        if self.strategy == "GLOB":
            patterns = [each.strip().lower() for each in (self.patterns or "").split(",")]
            path = name.lower()
            forms = (path, path.rpartition("/")[2])
            return any(fnmatchcase(form, pattern) for form in forms for pattern in patterns)
        return self.strategy == "HEADER" or _kind_of(_extension(name)) is not None

    def kind(self, name: str, head: Callable[[], bytes]) -> MediaKind | None:
        """Return the kind of a file; `head` reads its first bytes."""
        by_name = _kind_of(_extension(name))
        if self.strategy == "EXTENSION" or (self.strategy == "GLOB" and by_name is not None):
            return by_name
        return _kind_of(guess_extension(head())) or by_name


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _kind_of(extension: str | None) -> MediaKind | None:
    if extension in IMAGE_EXTENSIONS:
        return "image"
    return "av" if extension in AV_EXTENSIONS else None


class Probed(NamedTuple):
    """The result of a job."""

    job: MediaJob
    found: list[tuple[str, MediaMetadata]]
    """File names and metadata."""
    failed: list[tuple[str, str]]
    """Names of damaged files, and what is wrong with them."""


def probe_stream(stream: IO[bytes], name: str, chosen: MediaFilter) -> MediaMetadata | None:
    """Return the metadata of a file, or None if it is not a media file.

    Raises:
        DecodeError: If it is damaged.
        MissingExtraError: If it is audio or video, and PyAV is not installed.
    """
    kind = chosen.kind(name, lambda: stream.read(SIGNATURE_BYTES))
    stream.seek(0)
    return None if kind is None else _METADATA[kind](stream)


class ShardParts:
    """The parts of a shard by number.

    Args:
        dataset: The folder that has its part table.
        shard: Its path below it.

    Raises:
        DatasetNotFoundError: If the shard is missing.
        FormatError: If its index is damaged.
    """

    def __init__(self, dataset: str | Path, shard: str) -> None:
        path = Path(dataset, shard)
        self.job = MediaJob(shard, *file_state(path))
        with reporting(path):
            self._table = open_part_table(path)
        self._first_part = self._table.first_part

    def __len__(self) -> int:
        return self._table.num_parts

    def name(self, number: int) -> str:
        """Return the name of the file that is a part."""
        sample = int(np.searchsorted(self._first_part, number, side="right")) - 1
        part = self._table.part_names[self._table.part_name[number]]
        return f"{self._table.key_of(sample)}.{part}"

    def open(self, file: RangeFile, number: int) -> IO[bytes]:
        """Open a part of the shard in `file`."""
        table = self._table
        return open_range(file, int(table.part_offset[number]), int(table.part_size[number]))


def probe_parts(
    dataset: str, shard: str, chosen: MediaFilter, contents: str | None, numbers: range
) -> tuple[Probed, int]:
    """Return the metadata of the media files among some parts of a shard, and their number.

    Records the current part, see `energon.prepare.crash_isolation.note`.

    Args:
        dataset: The folder that has the part table.
        shard: Path below it.
        chosen: Which files to read.
        contents: Where the shard is, if the folder only stands for a remote one.
        numbers: Numbers of the parts.

    Raises:
        DatasetNotFoundError: If the shard is missing.
        FormatError: If its index is damaged.
        MissingExtraError: If there is audio or video, and PyAV is not installed.
    """
    parts = ShardParts(dataset, shard)
    file = _open(Path(dataset, shard), shard, contents)

    def streams() -> Iterator[tuple[str, IO[bytes]]]:
        for number in numbers:
            name = parts.name(number)
            if chosen.may_match(name):
                note(number)
                yield name, parts.open(file, number)

    return Probed(parts.job, *_probe_all(streams(), chosen)), len(numbers)


def probe_some_files(
    files: FolderFiles, names: Sequence[str], chosen: MediaFilter, numbers: range
) -> list[Probed]:
    """Return the metadata of some files in a folder; see `probe_parts`.

    Args:
        files: The files of the folder.
        names: Their paths.
        chosen: Which of them are media files.
        numbers: Which of `names` to examine.

    Raises:
        MissingExtraError: If there is audio or video, and PyAV is not installed.
    """
    streams = files.open([names[number] for number in numbers])
    probed = []
    for number in numbers:
        name = names[number]
        job = files.job(name)
        note(number)
        probed.append(Probed(job, *_probe_all([(name, next(streams))], chosen)))
    return probed


def _open(path: Path, shard: str, contents: str | None) -> RangeFile:
    with reporting(path):
        if contents is None:
            return OpenFile(str(path))
        return RemoteFile(join_address(contents, shard))


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
            if isinstance(error, StorageError) and not isinstance(error, ObjectChangedError):
                raise  # says nothing about the file
            # Decoders raise anything on bytes that were corrupted on purpose. Pillow ends its
            # message with the stream.
            failed.append((name, describe_error(error).partition(" <_io.")[0]))
            continue
        if metadata is not None:
            found.append((name, metadata))
    return found, failed


def _av_metadata(stream: IO[bytes]) -> MediaMetadata:
    check_size(stream, after_header=False)
    metadata = AVDecoder(stream).get_metadata(get_audio_num_samples=True)
    if metadata == AVMetadata():
        raise DecodeError("the file has neither a video nor an audio stream")
    return metadata


_METADATA = {"image": image_metadata, "av": _av_metadata}
