"""Add media metadata to a prepared dataset, or to a folder of files.

What is found is collected in a copy of `index.sqlite` that replaces it at the end. A run that
was killed is continued, and one that is done again looks at new and changed shards only.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from energon.errors import ConfigError, EnergonError
from energon.formats.info import META, load_info
from energon.formats.media_table import Job, MediaWriter
from energon.formats.sqlite_file import get_mark, set_mark
from energon.prepare.engines import Engine, run_batches
from energon.prepare.files import file_state, list_files, reporting
from energon.prepare.lock import dataset_lock
from energon.prepare.media_filter import MediaFilter
from energon.prepare.media_probe import Probed, probe_files, probe_shards
from energon.prepare.name_index import sqlite_path

log = logging.getLogger("energon")

FILES_PER_BATCH = 200
WORK_NAME = "media.partial.sqlite"


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
    engine: Engine | None = None,
    wait: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MediaReport:
    """Look at the media files of a dataset or folder, and store what their headers say.

    Args:
        path: Folder of a prepared dataset, or any folder of files.
        chosen: Which files.
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
    probe, names, batch_size = _plan(folder, chosen)
    engine = Engine() if engine is None else engine
    with dataset_lock(folder, wait=wait), _work_copy(folder) as work:
        writer = MediaWriter(work, chosen.strategy, chosen.patterns)
        try:
            report = _run(folder, writer, probe, names, batch_size, chosen, engine, progress)
        finally:
            writer.close()
        with reporting(work):
            set_mark(work, 0)
            with open(work, "rb") as file:
                os.fsync(file.fileno())
            os.replace(work, sqlite_path(folder))
    return report


Probe = Callable[[str, Sequence[str], MediaFilter], list[Probed]]


def _plan(folder: Path, chosen: MediaFilter) -> tuple[Probe, list[str], int]:
    """Return how files are looked at, the names of all jobs, and how many go together."""
    try:
        shards = list(load_info(folder).shard_counts)
    except EnergonError:
        names = [name for name in list_files(folder) if chosen.may_match(name)]
        return probe_files, names, FILES_PER_BATCH
    if not sqlite_path(folder).is_file():
        raise ConfigError(
            f"{folder}: media metadata are kept in {META}/index.sqlite, which this dataset was "
            f"prepared without; run `energon index {folder}` first"
        )
    return probe_shards, shards, 1


def _run(
    folder: Path,
    writer: MediaWriter,
    probe: Probe,
    names: list[str],
    batch_size: int,
    chosen: MediaFilter,
    engine: Engine,
    progress: Callable[[int, int], None],
) -> MediaReport:
    present = {name: Job(name, *file_state(folder / name)) for name in names}
    done = writer.done()
    todo = [name for name, job in present.items() if job not in done]
    gone = {job.name for job in done} - set(present)
    known = {job.name for job in done}
    writer.forget([*gone, *(name for name in todo if name in known)])
    report = MediaReport(looked_at=len(todo))
    finished = len(names) - len(todo)
    progress(finished, len(names))
    batches = [todo[start : start + batch_size] for start in range(0, len(todo), batch_size)]
    work = ((str(folder), batch, chosen) for batch in batches)
    for _, probed in run_batches(engine, probe, work):
        writer.write((result.job, result.found) for result in probed)
        report.failed += [failure for result in probed for failure in result.failed]
        finished += len(probed)
        progress(finished, len(names))
    report.stored = writer.count()
    return report


@contextmanager
def _work_copy(folder: Path) -> Iterator[Path]:
    """Give a copy of the index to work on; the one that a killed run has left goes on.

    After an error of the data it is deleted, since that may lie in what was copied.
    """
    index, work = sqlite_path(folder), folder / META / WORK_NAME
    version = _version(index)
    with reporting(work):
        if get_mark(work) != version:
            _remove(work)
            if index.exists():
                temporary = work.with_suffix(".copy")
                shutil.copyfile(index, temporary)
                os.replace(temporary, work)
            set_mark(work, version)
    try:
        yield work
    except EnergonError:
        _remove(work)
        raise


def _version(index: Path) -> int:
    """Return a number above 0 that differs whenever the index does."""
    if not index.exists():
        return 1
    about = index.stat()
    return zlib.crc32(f"{about.st_size} {about.st_mtime_ns}".encode()) >> 2 | 2


def _remove(work: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        work.with_name(work.name + suffix).unlink(missing_ok=True)
