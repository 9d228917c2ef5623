"""Inspect media files without decoding them: only their headers are read.

They are the parts of shards, or the files of a folder on this machine or in an object store.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

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
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import open_part_table
from energon.io.address import join_address
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


class FolderFiles(Protocol):
    """Files by their paths below a folder. Can be pickled."""

    def names(self) -> list[str]:
        """Return all paths, sorted."""

    def job(self, name: str) -> MediaJob:
        """Return a file as it is now, or as it was when the folder was listed."""

    def only(self, names: Sequence[str]) -> FolderFiles:
        """Return these files only, for a job in a different process."""

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order. Each is closed when the next one is requested."""


@dataclass(frozen=True)
class LocalFiles:
    """The files of a folder on this machine."""

    folder: Path

    def names(self) -> list[str]:
        """Return all paths, sorted."""
        return list_dataset_files(self.folder)

    def job(self, name: str) -> MediaJob:
        """Return a file as it is now."""
        return MediaJob(name, *file_state(self.folder / name))

    def only(self, names: Sequence[str]) -> LocalFiles:
        """Return the folder itself: files are opened by their paths."""
        return self

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order."""
        for name in names:
            path = self.folder / name
            with reporting(path), open_binary(path) as stream:
                yield stream


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a folder in an object store.

    Args:
        address: The folder.
        listed: What the store reported about each file, by path.
    """

    address: str
    listed: Mapping[str, ObjectInfo]

    def names(self) -> list[str]:
        """Return all paths, sorted."""
        return sorted(self.listed)

    def job(self, name: str) -> MediaJob:
        """Return a file as it was when the folder was listed."""
        return MediaJob(name, self.listed[name].size, self.listed[name].mtime_ns)

    def only(self, names: Sequence[str]) -> RemoteFiles:
        """Return some of the files: the list of all may be long."""
        return RemoteFiles(self.address, {name: self.listed[name] for name in names})

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order. Their first bytes are requested together."""
        store, _ = open_store(self.address)
        yield from store.together(self._open, [(name,) for name in names])

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


def probe_files(files: FolderFiles, names: Sequence[str], chosen: MediaFilter) -> list[Probed]:
    """Return the metadata of some files in a folder; see `probe_shards`."""
    return probe_some_files(files, names, chosen, range(len(names)))


def probe_stream(stream: IO[bytes], name: str, chosen: MediaFilter) -> MediaMetadata | None:
    """Return the metadata of a file, or None if it is not a media file.

    Raises:
        DecodeError: If it is damaged.
        MissingExtraError: If it is audio or video, and PyAV is not installed.
    """
    kind = chosen.kind(name, lambda: stream.read(SIGNATURE_BYTES))
    stream.seek(0)
    return None if kind is None else _METADATA[kind](stream)


def probe_samples(
    dataset: str,
    shard: str,
    count: int,
    chosen: MediaFilter,
    contents: str | None,
    samples: range,
) -> tuple[Probed, int]:
    """Return the metadata of the media files in some samples of a shard, and their number.

    Records the current sample, see `energon.prepare.crash_isolation.note`.

    Args:
        dataset: The folder that has the part table.
        shard: Path below it.
        count: How many samples it is expected to have. Reading the last one includes any after it.
        chosen: Which files to read.
        contents: Where the shard is, if the folder only stands for a remote one.
        samples: Numbers of the samples.
    """
    path = Path(dataset, shard)
    table = _open_table(path)
    stop = table.num_samples if samples.stop == count else min(samples.stop, table.num_samples)
    file = _open(path, shard, contents)
    metadata, failed = [], []
    for sample in range(samples.start, stop):
        note(sample)
        parts = _parts(table, chosen, sample)
        some = _probe_all(_streams(file, parts), chosen)
        metadata += some[0]
        failed += some[1]
    return Probed(MediaJob(shard, *file_state(path)), metadata, failed), len(samples)


def probe_parts(
    dataset: str, shard: str, chosen: MediaFilter, contents: str | None, sample: int, parts: range
) -> Probed:
    """Return the metadata of some of the media files of a sample, see `probe_samples`."""
    path = Path(dataset, shard)
    file = _open(path, shard, contents)
    candidates = _parts(_open_table(path), chosen, sample)
    metadata, failed = [], []
    for number in parts:
        note(number)
        some = _probe_all(_streams(file, [candidates[number]]), chosen)
        metadata += some[0]
        failed += some[1]
    return Probed(MediaJob(shard, *file_state(path)), metadata, failed)


def probe_some_files(
    files: FolderFiles, names: Sequence[str], chosen: MediaFilter, numbers: range
) -> list[Probed]:
    """Return the metadata of some files in a folder; see `probe_samples`."""
    streams = files.open([names[number] for number in numbers])
    probed = []
    for number in numbers:
        name = names[number]
        job = files.job(name)
        note(number)
        probed.append(Probed(job, *_probe_all([(name, next(streams))], chosen)))
    return probed


def media_parts(
    dataset: Path, shard: str, chosen: MediaFilter, samples: range
) -> list[tuple[str, int, int]]:
    """Return name, offset and size of the parts of some samples that may be media files."""
    table = _open_table(dataset / shard)
    return [part for sample in samples for part in _parts(table, chosen, sample)]


def _probe_shard(dataset: Path, shard: str, chosen: MediaFilter, contents: str | None) -> Probed:
    path = dataset / shard
    state = file_state(path)
    table = _open_table(path)
    file = _open(path, shard, contents)
    parts = [p for sample in range(table.num_samples) for p in _parts(table, chosen, sample)]
    return Probed(MediaJob(shard, *state), *_probe_all(_streams(file, parts), chosen))


def _open_table(path: Path) -> PartTable:
    with reporting(path):
        return open_part_table(path)


def _open(path: Path, shard: str, contents: str | None) -> RangeFile:
    with reporting(path):
        if contents is None:
            return OpenFile(str(path))
        return RemoteFile(join_address(contents, shard))


def _parts(table: PartTable, chosen: MediaFilter, sample: int) -> list[tuple[str, int, int]]:
    key = table.key_of(sample)
    named = ((f"{key}.{part}", start, size) for part, start, size in table.sample_parts(sample))
    return [part for part in named if chosen.may_match(part[0])]


def _streams(
    file: RangeFile, parts: Sequence[tuple[str, int, int]]
) -> Iterator[tuple[str, IO[bytes]]]:
    return ((name, open_range(file, offset, size)) for name, offset, size in parts)


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
