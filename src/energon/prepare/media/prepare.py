"""Add media metadata to a prepared dataset, or to a folder of files.

What is found is collected in a copy of `index.sqlite` that replaces it at the end. A run that
was killed is continued, and one that is done again looks at new and changed shards only.
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

from energon.errors import ConfigError, EnergonError, FormatError
from energon.formats.meta.info import META, load_info
from energon.formats.tables.media_table import MediaJob, MediaWriter
from energon.formats.tables.sqlite_file import SqliteReader, get_mark, set_mark
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import file_state, list_files, reporting
from energon.prepare.index.name_index import sqlite_path
from energon.prepare.lock import dataset_lock
from energon.prepare.media.crash_isolation import FILES_PER_JOB, surviving_files, surviving_shards
from energon.prepare.media.filter import MediaFilter
from energon.prepare.media.probe import Probed, probe_files, probe_shards
from energon.prepare.remote import standing_in

log = logging.getLogger("energon")

WORK_NAME = "media.partial.sqlite"

Progress = Callable[[int, int], None]


@dataclass
class MediaReport:
    """What a run has done.

    Args:
        stored: How many files have metadata now.
        looked_at: How many shards or files were looked at in this run; all others had not
            changed.
        failed: Names of files that are damaged, and how.
    """

    stored: int = 0
    looked_at: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def prepare_media(
    path: str | os.PathLike[str],
    chosen: MediaFilter,
    *,
    contents: str | None = None,
    engine: Engine | None = None,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> MediaReport:
    """Look at the media files of a dataset or folder, and store what their headers say.

    Args:
        path: Folder of a prepared dataset, or any folder of files.
        chosen: Which files.
        contents: Where the shards are, if the folder only stands for a remote one.
        engine: Where to do it; None for processes of this machine.
        wait: Whether to wait for another process that prepares the dataset.
        progress: Called with the number of shards (or files) that are done, and of all.

    Raises:
        DatasetNotFoundError: If there is no such folder, or a shard is missing.
        ConfigError: If it is a dataset without `index.sqlite`.
        DatasetBusyError: If another process prepares it.
        MissingExtraError: If there is audio or video, and PyAV is not installed.
    """
    folder = Path(path)
    is_dataset, names = _plan(folder, chosen)
    engine = Engine() if engine is None else engine
    with dataset_lock(folder, wait=wait), _work_copy(folder) as work:
        writer = MediaWriter(work, chosen.strategy, chosen.patterns)
        try:
            todo, report = _start(folder, writer, names)
            progress(len(names) - len(todo), len(names))
            for probed in _probe(engine, folder, todo, chosen, contents, is_dataset):
                writer.write((result.job, result.found) for result in probed)
                report.looked_at += len(probed)
                report.failed += [failure for result in probed for failure in result.failed]
                progress(len(names) - len(todo) + report.looked_at, len(names))
            report.stored = writer.count()
        finally:
            writer.close()
        with reporting(work):
            set_mark(work, 0)
            with open(work, "rb") as file:
                os.fsync(file.fileno())
            os.replace(work, sqlite_path(folder))
    return report


def prepare_remote_media(
    address: str, chosen: MediaFilter, *, num_workers: int, progress: Progress
) -> MediaReport:
    """Do the same for a dataset in an object store; of each file, its header is fetched.

    Args:
        address: The dataset.
        chosen: Which files.
        num_workers: Processes of this machine that look at shards.
        progress: Called with the number of shards that are done, and of all.

    Raises:
        DatasetNotFoundError: If there are no shards.
        StorageError: If the store cannot be read or written.
    """
    with standing_in(address) as folder:
        return prepare_media(
            folder,
            chosen,
            contents=address,
            engine=Engine(num_workers=num_workers),
            wait=True,
            progress=progress,
        )


def _probe(
    engine: Engine,
    folder: Path,
    todo: Sequence[str],
    chosen: MediaFilter,
    contents: str | None,
    is_dataset: bool,
) -> Iterator[list[Probed]]:
    """Yield what is found in shards or files, as it becomes ready."""
    if engine.name != "local":
        look: Callable[..., list[Probed]] = probe_shards if is_dataset else probe_files
        size = 1 if is_dataset else FILES_PER_JOB
        some = ((str(folder), todo[at : at + size]) for at in range(0, len(todo), size))
        batches = ((*each, chosen, contents) for each in some)
        for _, probed in run_batches(engine, look, batches):
            yield probed
    elif is_dataset:
        yield from surviving_shards(folder, todo, chosen, contents, engine.num_local)
    else:
        yield from surviving_files(folder, todo, chosen, engine.num_local)


def _plan(folder: Path, chosen: MediaFilter) -> tuple[bool, list[str]]:
    """Return whether it is a dataset, and the names of its shards, or of files."""
    try:
        shards = list(load_info(folder).shard_counts)
    except EnergonError:
        names = [name for name in list_files(folder) if chosen.may_match(name)]
        return False, names
    if not sqlite_path(folder).is_file():
        raise ConfigError(
            f"{folder}: media metadata are kept in {META}/index.sqlite, which this dataset was "
            f"prepared without; run `energon index {folder}` first"
        )
    return True, shards


def _start(folder: Path, writer: MediaWriter, names: list[str]) -> tuple[list[str], MediaReport]:
    """Return the jobs that are new or changed, after forgetting what was known of these."""
    present = {name: MediaJob(name, *file_state(folder / name)) for name in names}
    done = writer.done()
    todo = [name for name, job in present.items() if job not in done]
    known = {job.name for job in done}
    writer.forget([*(known - set(present)), *(name for name in todo if name in known)])
    return todo, MediaReport()


@contextmanager
def _work_copy(folder: Path) -> Iterator[Path]:
    """Give a copy of the index to work on; the one that a killed run has left goes on.

    After an error of the data it is deleted, since that may lie in what was copied.
    """
    index, work = sqlite_path(folder), folder / META / WORK_NAME
    version = _version(index)
    with reporting(work):
        if get_mark(work) != version or not _is_readable(work):
            _remove(work)
            if index.exists():
                with SqliteReader(index):
                    pass  # nothing in it makes SQLite do more than it is told
                temporary = work.with_suffix(".copy")
                shutil.copyfile(index, temporary)
                os.replace(temporary, work)
            set_mark(work, version)
    try:
        yield work
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
    """Return a number above 0 that differs whenever the index does."""
    if not index.exists():
        return 1
    about = index.stat()
    return zlib.crc32(f"{about.st_size} {about.st_mtime_ns}".encode()) >> 2 | 2


def _remove(work: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        work.with_name(work.name + suffix).unlink(missing_ok=True)
