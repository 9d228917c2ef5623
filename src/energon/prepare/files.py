"""File access for preparing datasets.

Many small files are made durable together: they are written under temporary names, flushed to
disk with one call, and renamed, so each appears atomically. One process at a time writes a
dataset, and removes the leftovers of killed ones.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from energon.errors import (
    DatasetBusyError,
    DatasetNotFoundError,
    EnergonError,
    StorageAccessError,
    StorageError,
    StorageFullError,
)
from energon.formats.meta.info import META
from energon.formats.text import parse_json
from energon.io.atomic import FileLock, is_full, is_unsupported, publish, remedy_if_full
from energon.io.backends.local import walk_files
from energon.metadataset.kind import advice, explain_missing

MIN_FLUSH_TOGETHER = 8
"""Fewer files than this are flushed one by one, to avoid waiting for other programs' writes."""


class FileState(NamedTuple):
    """Size and modification time of a file."""

    size: int
    mtime_ns: int


def list_dataset_files(dataset: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted.

    See `walk_files` for links and hidden files.

    Raises:
        DatasetNotFoundError: If there is no such folder.
    """
    if dataset.is_file():
        raise DatasetNotFoundError(f"{dataset} {advice(str(dataset))}")
    if not dataset.is_dir():
        raise DatasetNotFoundError(explain_missing(str(dataset)))
    return sorted(path for path, _ in walk_files(os.fspath(dataset)))


def file_state(path: str | os.PathLike[str]) -> FileState:
    """Return size and date of a file.

    Raises:
        DatasetNotFoundError: If it does not exist.
    """
    with reporting(path):
        status = os.stat(path)
    return FileState(status.st_size, status.st_mtime_ns)


def write_files(files: Iterable[tuple[Path, bytes]], *, durable: bool = True) -> None:
    """Write files atomically.

    Args:
        files: Paths and contents.
        durable: Whether to flush them to disk. If not, a power failure before `flush_files` may
            leave truncated files.

    Raises:
        StorageError: If the disk is full or the folder cannot be written to.
    """
    commit_files(stage_files(files, durable=durable))


def stage_files(files: Iterable[tuple[Path, bytes]], *, durable: bool) -> list[tuple[Path, Path]]:
    """Write files that belong together under temporary names; return these and the final paths.

    Args:
        files: Paths and contents.
        durable: Whether to wait until they are on disk.

    Raises:
        StorageError: If the disk is full or the folder cannot be written to.
    """
    staged: list[tuple[Path, Path]] = []
    token = os.urandom(4).hex()  # `leftovers` recognizes such names
    try:
        for target, content in files:
            temporary = target.with_name(f".{target.name}.{token}")
            staged.append((temporary, target))
            with reporting(target):
                temporary.write_bytes(content)
        if durable:
            flush_files([temporary for temporary, _ in staged])
    except BaseException:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
        raise
    return staged


def commit_files(staged: Iterable[tuple[Path, Path]]) -> None:
    """Rename the files of `stage_files` to their final names, in order."""
    for temporary, target in staged:
        with reporting(target):
            publish(temporary, target)


@contextmanager
def temporary_file(target: Path) -> Iterator[Path]:
    """Yield an empty file next to `target`, which is deleted at the end unless it was renamed.

    Raises:
        StorageError: If it cannot be created.
    """
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    with reporting(target):
        temporary.touch()
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def reporting(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a system error into one that names the remedy.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageAccessError: If it may not be read or written.
        StorageFullError: If the disk is full.
        StorageError: If anything else fails.
    """
    try:
        yield
    except EnergonError:
        raise  # has its own message
    except FileNotFoundError as error:
        raise DatasetNotFoundError(
            f"{path}: no such file; if it was deleted in the meantime, run `energon prepare` again"
        ) from error
    except PermissionError as error:
        raise _not_allowed(path, error) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise _not_allowed(path, error) from error
        raise _failed(path, error) from error


@contextmanager
def reporting_full_disks(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of a full disk into one that names the remedy; other errors pass unchanged.

    Args:
        folder: Stands for the file that could not be written, unless the error names it.

    Raises:
        StorageFullError: If the disk is full.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise _failed(error.filename or folder, error) from error


def _failed(path: str | os.PathLike[str], error: OSError) -> StorageError:
    remedy = remedy_if_full(error)
    hint = f"; {remedy} and run it again; completed work is kept" if remedy else ""
    kind = StorageFullError if remedy else StorageError
    return kind(f"{path}: {error.strerror or error}{hint}")


def _not_allowed(path: str | os.PathLike[str], error: OSError) -> StorageAccessError:
    if error.errno != errno.EROFS and os.path.isfile(path) and not os.access(path, os.R_OK):
        return StorageAccessError(f"{path}: {error.strerror}; make it readable for this user")
    return StorageAccessError(
        f"{path}: {error.strerror}; its folder must be writable: change that or, for read-only "
        "shards, prepare a folder with links to them"
    )


def flush_files(paths: Sequence[Path]) -> None:
    """Wait until files are on disk.

    Raises:
        StorageError: If they cannot be written there.
    """
    if len(paths) >= MIN_FLUSH_TOGETHER and all(map(_flush_file_system, _folders(paths))):
        return
    for path in paths:
        with reporting(path), open(path, "rb") as file:
            os.fsync(file.fileno())


def _folders(paths: Sequence[Path]) -> list[Path]:
    """Return one folder for each file system that the files are on."""
    folders: dict[int, Path] = {}
    for folder in {path.parent for path in paths}:
        with reporting(folder):
            folders[os.stat(folder).st_dev] = folder
    return list(folders.values())


def _flush_file_system(folder: Path) -> bool:
    """Flush a whole file system; return whether the system supports it."""
    with reporting(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync = getattr(ctypes.CDLL(None), "syncfs", None)
        return sync is not None and sync(descriptor) == 0
    finally:
        os.close(descriptor)


logger = logging.getLogger("energon")
LOCK_POLL_SECONDS = 0.2


@contextmanager
def dataset_lock(dataset: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the exclusive right to write a dataset, until this process releases it or ends.

    Yields whether the last holder was killed: then the state of its work is unknown.

    Args:
        dataset: Its folder.
        wait: Whether to wait for another process that holds it.

    Raises:
        DatasetBusyError: If another process holds it.
    """
    meta = dataset / META
    with reporting(meta):
        meta.mkdir(exist_ok=True)
    path = meta / ".lock"
    lock = _acquire(path, dataset, wait=wait)
    try:
        yield lock is not None and lock.existed
    finally:
        if lock is not None:
            lock.delete()
            lock.close()


def _acquire(path: Path, dataset: Path, *, wait: bool) -> FileLock | None:
    """Return the held lock; None if the file system has no locks."""
    while True:
        with reporting(path):
            lock = FileLock(path)
        try:
            if not lock.hold(wait=False):
                if not wait:
                    raise DatasetBusyError(
                        f"{dataset}: {_holder(lock)} is writing it now; wait until it is done, or "
                        "pass --wait"
                    )
                time.sleep(LOCK_POLL_SECONDS)
            elif lock.is_at_path:
                _sign(lock)
                return lock
            # Otherwise the process that held it has deleted it in the meantime.
            lock.close()
        except OSError as error:
            lock.close()
            if not is_unsupported(error):
                raise
            logger.warning(
                "%s: this file system has no locks; make sure that only one process at a time "
                "prepares the dataset",
                dataset,
            )
            return None


def _sign(lock: FileLock) -> None:
    """Record who holds the lock, unless the disk is full."""
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    with suppress(OSError):
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, holder.encode(), 0)


def _holder(lock: FileLock) -> str:
    try:
        holder = parse_json(os.pread(lock.descriptor, 4096, 0), origin="lock")
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


# Names of files until they are complete.
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
_INDEX_SUFFIXES = (".tar.idx", ".tar.parts")


def is_leftover(name: str) -> bool:
    """Return whether a file has the name of an incomplete one."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: str | os.PathLike[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Delete the temporary files in a folder that were to get one of our names.

    Call it only while no one else writes these files.

    Returns:
        The names of the deleted files.
    """
    deleted = []
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and is_ours(match[1]):
            os.unlink(os.path.join(folder, name))
            deleted.append(name)
    return deleted


def clear_leftovers(dataset: Path, shards: Iterable[str]) -> None:
    """Delete the leftovers of killed preparations. Call it with the dataset's lock held."""
    for folder in {(dataset / shard).parent for shard in shards}:
        remove_leftovers(folder, lambda name: name.endswith(_INDEX_SUFFIXES))
    remove_leftovers(dataset / META, lambda name: True)
