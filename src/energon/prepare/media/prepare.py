"""Add media metadata to a prepared dataset, or to a folder of files.

Results are collected in a copy of `index.sqlite` that replaces it at the end. A killed run is
continued, and a repeated run looks only at new and changed shards.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from energon.errors import ConfigError, EnergonError, FormatError, StorageError
from energon.formats.meta.info import INFO_FILES, META, load_info
from energon.formats.tables.media_table import MediaJob, MediaWriter
from energon.formats.tables.sqlite_file import SqliteReader, get_mark, set_mark, writing_file
from energon.io.atomic import atomic_path, publish
from energon.io.epath import AnyPath, EPath
from energon.messages import shell_word
from energon.metadataset.advice import refuse_metadata
from energon.prepare.crash_isolation import Death, IsolatedCall, run_isolated
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import dataset_lock, file_state, reporting
from energon.prepare.index.name_index import sqlite_path
from energon.prepare.media.probe import (
    FolderFiles,
    MediaFilter,
    Probed,
    ShardParts,
    probe_parts,
    probe_some_files,
)
from energon.prepare.remote import check_writable, mirrored, mirrored_metadata

PARTS_PER_JOB = 16384
"""How much is checked again if a process dies."""
FILES_PER_JOB = 200
PROBING_DIED = "the process that read it died: a codec has crashed, or memory ran out"


def probe_files_isolated(
    files: FolderFiles, names: Sequence[str], chosen: MediaFilter, num_processes: int
) -> Iterator[list[Probed]]:
    """Yield the metadata of some files in a folder, as it becomes ready.

    Args:
        files: The files of the folder.
        names: Which of them are examined.
        chosen: Which of these are media files.
        num_processes: Number of processes.
    """
    batches = [names[at : at + FILES_PER_JOB] for at in range(0, len(names), FILES_PER_JOB)]
    jobs = [
        IsolatedCall(number, (files.only(batch), batch, chosen), range(len(batch)))
        for number, batch in enumerate(batches)
    ]
    for number, result in run_isolated(probe_some_files, jobs, num_processes):
        if isinstance(result, Death):
            name = batches[number][result.ordinal]
            yield [Probed(files.job(name), [], [(name, PROBING_DIED)])]
        else:
            yield result


def probe_shards_isolated(
    folder: Path,
    shards: Sequence[str],
    chosen: MediaFilter,
    contents: str | None,
    num_processes: int,
) -> Iterator[list[Probed]]:
    """Yield the metadata of the media files in each of some shards, as it becomes ready.

    Args:
        folder: The dataset.
        shards: Paths below it.
        chosen: Which parts are media files.
        contents: Where the shards are, if the folder only stands for a remote one.
        num_processes: Number of processes.
    """
    jobs: list[IsolatedCall] = []
    owners: list[_ProbedShard] = []
    for name in shards:
        parts = ShardParts(folder, name)
        shard = _ProbedShard(Probed(parts.job, [], []), len(parts))
        for start in range(0, len(parts), PARTS_PER_JOB):
            numbers = range(start, min(len(parts), start + PARTS_PER_JOB))
            jobs.append(IsolatedCall(len(jobs), (str(folder), name, chosen, contents), numbers))
            owners.append(shard)
        if not len(parts):
            yield [shard.probed]
    for number, result in run_isolated(probe_parts, jobs, num_processes):
        shard = owners[number]
        if isinstance(result, Death):
            parts = ShardParts(folder, shard.probed.job.name)
            shard.probed.failed.append((parts.name(result.ordinal), PROBING_DIED))
            shard.left -= 1
        else:
            probed, count = result
            shard.probed.found.extend(probed.found)
            shard.probed.failed.extend(probed.failed)
            shard.left -= count
        if not shard.left:
            yield [shard.probed]


@dataclass
class _ProbedShard:
    """What is known about a shard so far, and how many of its parts are not done yet."""

    probed: Probed
    left: int


logger = logging.getLogger("energon")

WORK_NAME = "media.partial.sqlite"

Progress = Callable[[int, int], None]


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
    progress: Progress = lambda done, total: None,
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
    with dataset_lock(folder, wait=wait), _work_copy(folder) as work:
        writer = MediaWriter(work, chosen.strategy, chosen.patterns)
        try:
            if files is None:
                jobs = [MediaJob(name, *file_state(folder / name)) for name in names]
            else:
                jobs = list(map(files.job, names))
            todo, report = _start(writer, jobs)
            progress(len(names) - len(todo), len(names))
            if files is None:
                results = _probe_shards(engine, folder, todo, chosen, contents)
            else:
                results = _probe_files(engine, files, todo, chosen)
            for probed in results:
                writer.write((result.job, result.found) for result in probed)
                report.looked_at += len(probed)
                report.failed += [failure for result in probed for failure in result.failed]
                progress(len(names) - len(todo) + report.looked_at, len(names))
            report.stored = writer.count()
        finally:
            writer.close()
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


def _probe_shards(
    engine: Engine,
    folder: Path,
    todo: Sequence[str],
    chosen: MediaFilter,
    contents: str | None,
) -> Iterator[list[Probed]]:
    """Yield the metadata of media in shards, as it becomes ready."""
    if engine.name == "local":
        yield from probe_shards_isolated(folder, todo, chosen, contents, engine.num_local)
        return
    batches = (
        (str(folder), shard, chosen, contents, range(len(ShardParts(folder, shard))))
        for shard in todo
    )
    for _, (probed, _) in run_batches(engine, probe_parts, batches):
        yield [probed]


def _probe_files(
    engine: Engine, files: FolderFiles, todo: Sequence[str], chosen: MediaFilter
) -> Iterator[list[Probed]]:
    """Yield the metadata of files, as it becomes ready."""
    if engine.name == "local":
        yield from probe_files_isolated(files, todo, chosen, engine.num_local)
        return
    some = (todo[at : at + FILES_PER_JOB] for at in range(0, len(todo), FILES_PER_JOB))
    batches = ((files.only(names), names, chosen, range(len(names))) for names in some)
    for _, probed in run_batches(engine, probe_some_files, batches):
        yield probed


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


def _start(writer: MediaWriter, jobs: Sequence[MediaJob]) -> tuple[list[str], MediaReport]:
    """Return the jobs that are new or changed, after dropping what was known about them."""
    present = {job.name: job for job in jobs}
    done = writer.done()
    todo = [name for name, job in present.items() if job not in done]
    names = {job.name for job in done}
    writer.forget([*(names - set(present)), *(name for name in todo if name in names)])
    return todo, MediaReport()


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
