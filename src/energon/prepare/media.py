"""Add media metadata to a prepared dataset, or to a folder of files.

Results are collected in a copy of `index.sqlite` that replaces it at the end. A killed run is
continued, and a repeated run looks only at new and changed shards.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
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
    EnergonError,
    FormatError,
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
from energon.formats.meta.info import INFO_FILES, META, load_info
from energon.formats.tables.part_table import open_part_table
from energon.formats.tables.sqlite_file import SqliteReader, get_mark, set_mark, writing_file
from energon.formats.tables.sqlite_index import MediaWriter, ShardState, Strategy
from energon.io.address import is_remote, join_address
from energon.io.atomic import atomic_path, publish
from energon.io.backends.base import ObjectInfo
from energon.io.epath import AnyPath, EPath
from energon.io.files import open_store
from energon.io.range_file import (
    REMOTE_BUFFER_BYTES,
    RangeFile,
    RawReader,
    RemoteFile,
    open_range,
    range_file,
)
from energon.local_file import open_binary
from energon.messages import describe_error, shell_word
from energon.metadataset.kind import refuse_metadata
from energon.prepare.engines import (
    Engine,
    IsolatedCall,
    Progress,
    no_progress,
    note,
    run_isolated,
)
from energon.prepare.files import dataset_lock, file_state, list_dataset_files, reporting
from energon.prepare.index import sqlite_path
from energon.prepare.remote import check_writable, mirrored, mirrored_metadata

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

    def state(self, name: str) -> ShardState:
        """Return a file as it was when the folder was listed."""
        return ShardState(name, self.listed[name].size, self.listed[name].mtime_ns)

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
    """The media files that were found in a shard or in a part of one, or a single file."""

    name: str
    """Path of the shard or file below the folder."""
    metadata: list[tuple[str, MediaMetadata]]
    """File names and metadata."""
    failed: list[tuple[str, str]]
    """Names of damaged files, and what is wrong with them."""
    num_parts: int = 1
    """How many parts of the shard were examined."""


class ShardParts:
    """The parts of a shard by number.

    Args:
        dataset: The folder that has its part table.
        shard: Its path below it.

    Raises:
        FormatError: If its index is damaged.
    """

    def __init__(self, dataset: str | Path, shard: str) -> None:
        path = Path(dataset, shard)
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
) -> list[Probed]:
    """Return the metadata of the media files among some parts of a shard.

    Records the current part, see `energon.prepare.engines.note`.

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
    path = Path(dataset, shard)
    with reporting(path):
        file = range_file(str(path) if contents is None else join_address(contents, shard))

    def streams() -> Iterator[tuple[str, IO[bytes]]]:
        for number in numbers:
            name = parts.name(number)
            if chosen.may_match(name):
                note(number)
                yield name, parts.open(file, number)

    return [Probed(shard, *_probe_all(streams(), chosen), len(numbers))]


def probe_files(
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
        note(number)
        name = names[number]
        probed.append(Probed(name, *_probe_all([(name, next(streams))], chosen)))
    return probed


def _probe_all(
    streams: Iterable[tuple[str, IO[bytes]]], chosen: MediaFilter
) -> tuple[list[tuple[str, MediaMetadata]], list[tuple[str, str]]]:
    metadata, failed = [], []
    for name, stream in streams:
        try:
            kind = chosen.kind(name, partial(stream.read, SIGNATURE_BYTES))
            stream.seek(0)
            if kind is not None:
                metadata.append((name, _METADATA[kind](stream)))
        except MissingExtraError:
            raise
        except Exception as error:
            if isinstance(error, StorageError) and not isinstance(error, ObjectChangedError):
                raise  # says nothing about the file
            # Decoders raise anything on bytes that were corrupted on purpose. Pillow ends its
            # message with the stream.
            failed.append((name, describe_error(error).partition(" <_io.")[0]))
    return metadata, failed


def _av_metadata(stream: IO[bytes]) -> MediaMetadata:
    check_size(stream, after_header=False)
    metadata = AVDecoder(stream).get_metadata(get_audio_num_samples=True)
    if metadata == AVMetadata():
        raise DecodeError("the file has neither a video nor an audio stream")
    return metadata


_METADATA = {"image": image_metadata, "av": _av_metadata}


PARTS_PER_JOB = 16384
"""How much is checked again if a process dies."""
FILES_PER_JOB = 200
PROBING_DIED = "the process that read it died: a codec has crashed, or memory ran out"


def _died_at_part(
    dataset: str, shard: str, chosen: MediaFilter, contents: str | None, number: int
) -> list[Probed]:
    return [Probed(shard, [], [(ShardParts(dataset, shard).name(number), PROBING_DIED)])]


def _died_at_file(
    files: FolderFiles, names: Sequence[str], chosen: MediaFilter, number: int
) -> list[Probed]:
    return [Probed(names[number], [], [(names[number], PROBING_DIED)])]


def _probe_shards(
    engine: Engine, folder: Path, shards: Sequence[str], chosen: MediaFilter, contents: str | None
) -> Iterator[list[Probed]]:
    """Yield the metadata of the media files in each of some shards, as it becomes ready."""
    jobs: list[IsolatedCall] = []
    unfinished: dict[str, Probed] = {}
    remaining = Counter[str]()
    for name in shards:
        num_parts = len(ShardParts(folder, name))
        unfinished[name] = Probed(name, [], [], num_parts)
        remaining[name] = num_parts
        if not num_parts:
            yield [unfinished[name]]
        for start in range(0, num_parts, PARTS_PER_JOB):
            numbers = range(start, min(num_parts, start + PARTS_PER_JOB))
            jobs.append(IsolatedCall(len(jobs), (str(folder), name, chosen, contents), numbers))
    for _, (probed,) in run_isolated(engine, probe_parts, jobs, _died_at_part):
        shard = unfinished[probed.name]
        shard.metadata.extend(probed.metadata)
        shard.failed.extend(probed.failed)
        remaining[probed.name] -= probed.num_parts
        if not remaining[probed.name]:
            yield [shard]


def _probe_files(
    engine: Engine, files: FolderFiles, names: Sequence[str], chosen: MediaFilter
) -> Iterator[list[Probed]]:
    """Yield the metadata of some files in a folder, as it becomes ready."""
    batches = [names[at : at + FILES_PER_JOB] for at in range(0, len(names), FILES_PER_JOB)]
    jobs = [
        IsolatedCall(number, (files.only(batch), batch, chosen), range(len(batch)))
        for number, batch in enumerate(batches)
    ]
    for _, probed in run_isolated(engine, probe_files, jobs, _died_at_file):
        yield probed


logger = logging.getLogger("energon")

WORK_NAME = "media.partial.sqlite"


@dataclass
class MediaReport:
    """The result of a run.

    Args:
        stored: How many files have metadata now.
        looked_at: How many shards or files were checked in this run; all others had not changed.
        failed: Names of damaged files, and what is wrong with them.
    """

    stored: int = 0
    looked_at: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def prepare_media(
    path: str | os.PathLike[str],
    chosen: MediaFilter,
    *,
    contents: str | None = None,
    files: FolderFiles | None = None,
    engine: Engine | None = None,
    wait: bool = False,
    progress: Progress = no_progress,
) -> MediaReport:
    """Read the headers of the media files of a dataset or folder, and store their metadata.

    Args:
        path: Folder of a prepared dataset, or any folder of files.
        chosen: Which files to read.
        contents: Where the shards are, if the folder only stands for a remote one.
        files: The files, if the folder only stands for a remote one without shards.
        engine: Where to run; None for processes of this machine.
        wait: Whether to wait for another process that prepares the dataset.
        progress: Called with the number of finished shards (or files), and the total.

    Raises:
        DatasetNotFoundError: If there is no such folder, or a shard is missing.
        ConfigError: If it is a dataset without `index.sqlite`.
        DatasetBusyError: If another process prepares it.
        MissingExtraError: If there is audio or video, and PyAV is not installed.
    """
    folder = Path(path)
    refuse_metadata(os.fspath(path))
    if files is None:
        files = None if _is_prepared(folder) else FolderFiles.of(folder)
    names = _shards(folder) if files is None else list(filter(chosen.may_match, files.names()))
    engine = Engine() if engine is None else engine
    report = MediaReport()
    with dataset_lock(folder, wait=wait), _work_copy(folder) as work:
        with closing(MediaWriter(work, chosen.strategy, chosen.patterns)) as writer:
            if files is None:
                present = {name: ShardState(name, *file_state(folder / name)) for name in names}
            else:
                present = {name: files.state(name) for name in names}
            done = writer.done()
            todo = [name for name, state in present.items() if state not in done]
            examined = {state.name for state in done}
            writer.forget([*(examined - set(present)), *(n for n in todo if n in examined)])
            progress(len(names) - len(todo), len(names))
            if files is None:
                results = _probe_shards(engine, folder, todo, chosen, contents)
            else:
                results = _probe_files(engine, files, todo, chosen)
            for probed in results:
                writer.write((present[result.name], result.metadata) for result in probed)
                report.looked_at += len(probed)
                report.failed += [failure for result in probed for failure in result.failed]
                progress(len(names) - len(todo) + report.looked_at, len(names))
            report.stored = writer.count()
        with reporting(work):
            set_mark(work, 0)
            publish(work, sqlite_path(folder), flush=True)
    return report


def prepare_remote_media(
    address: str, chosen: MediaFilter, *, num_workers: int, progress: Progress
) -> MediaReport:
    """Record metadata in an object store; little more than the header of each file is fetched.

    Args:
        address: The dataset, or any folder of files.
        chosen: Which files to read.
        num_workers: Number of local processes that read shards or files.
        progress: Called with the number of finished shards (or files), and the total.

    Raises:
        DatasetNotFoundError: If there are no files.
        StorageError: If the store cannot be read or written.
    """
    check_writable(address, "copy the folder to an object store")
    engine = Engine(num_workers=num_workers)
    if _is_prepared(EPath(address)):
        with mirrored(address) as folder:
            return prepare_media(
                folder, chosen, contents=address, engine=engine, wait=True, progress=progress
            )
    with mirrored_metadata(address) as (folder, listed):
        files = FolderFiles(address, {each.key: each for each in listed})
        return prepare_media(
            folder, chosen, files=files, engine=engine, wait=True, progress=progress
        )


def _is_prepared(folder: AnyPath) -> bool:
    """Return whether it is a dataset of shards, and not a folder of files."""
    return any((folder / META / name).is_file() for name in INFO_FILES)


def _shards(folder: Path) -> list[str]:
    """Return the shards of a prepared dataset.

    Raises:
        ConfigError: If it has no index that media metadata can be added to.
    """
    if not sqlite_path(folder).is_file():
        raise ConfigError(
            f"{folder}: media metadata is kept in {META}/index.sqlite, which this dataset was "
            f"prepared without; run `energon index {shell_word(folder)}` first"
        )
    return list(load_info(folder).shard_counts)


@contextmanager
def _work_copy(folder: Path) -> Iterator[Path]:
    """Yield a copy of the index to work on; one left behind by a killed run is continued.

    After an error in the data it is deleted, since the copy may contain the error.
    """
    index, work = sqlite_path(folder), folder / META / WORK_NAME
    version = _version(index)
    with reporting(work):
        if get_mark(work) != version or not _is_readable(work):
            _remove(work)
            if index.exists():
                with SqliteReader(index):
                    pass  # nothing in it makes SQLite do more than it is told
                with atomic_path(work) as temporary:
                    shutil.copyfile(index, temporary)
            set_mark(work, version)
    try:
        with writing_file(work):
            yield work
    except StorageError:
        raise  # nothing is wrong with the copy: the next run continues
    except EnergonError:
        _remove(work)
        raise
    except sqlite3.Error as error:
        _remove(work)
        raise FormatError(f"{index}: {error}; run `energon prepare` again") from error


def _is_readable(work: Path) -> bool:
    try:
        with SqliteReader(work):
            return True
    except FormatError:
        return False


def _version(index: Path) -> int:
    """Return a number above 0 that changes with the index."""
    if not index.exists():
        return 1
    status = index.stat()
    return zlib.crc32(f"{status.st_size} {status.st_mtime_ns}".encode()) >> 2 | 2


def _remove(work: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        work.with_name(work.name + suffix).unlink(missing_ok=True)
