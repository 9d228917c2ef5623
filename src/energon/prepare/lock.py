"""Let one process at a time write a dataset, and clear away what killed ones have left."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from energon.errors import DatasetBusyError
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.io.atomic import FileLock, is_unsupported
from energon.prepare.files import reporting

log = logging.getLogger("energon")
POLL_SECONDS = 0.2


@contextmanager
def dataset_lock(dataset: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the right to write a dataset. It ends with the process, however that ends.

    Yields whether the last process that held it was killed: then nobody knows what it has done.

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
    """Return the lock, held; None where the file system has no locks."""
    while True:
        with reporting(path):
            lock = FileLock(path)
        try:
            if not lock.hold(wait=False):
                _wait_or_refuse(lock, dataset, wait=wait)
            elif lock.is_at_path:
                _sign(lock)
                return lock
            # Otherwise the process that held it has deleted it meanwhile.
            lock.close()
        except OSError as error:
            lock.close()
            if not is_unsupported(error):
                raise
            log.warning(
                "%s: this file system has no locks; see to it that only one process at a time "
                "prepares the dataset",
                dataset,
            )
            return None


def _wait_or_refuse(lock: FileLock, dataset: Path, *, wait: bool) -> None:
    if not wait:
        raise DatasetBusyError(
            f"{dataset}: {_holder(lock)} is writing it now; wait until that is done, or pass --wait"
        )
    time.sleep(POLL_SECONDS)


def _sign(lock: FileLock) -> None:
    """Note who holds the lock; on a full disk nobody does."""
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    with suppress(OSError):
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, about.encode(), 0)


def _holder(lock: FileLock) -> str:
    try:
        about = parse_json(os.pread(lock.descriptor, 4096, 0), origin="lock")
        return f"process {about['pid']} on {about['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


# The names that files have until they are complete.
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
_INDEX_SUFFIXES = (".tar.idx", ".tar.parts")


def is_leftover(name: str) -> bool:
    """Return whether a file has the name of one that is not complete yet."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: str | os.PathLike[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Delete the temporary files in a folder that would have got one of our names.

    Call it only while nobody else writes these files.

    Returns:
        The names of what was deleted.
    """
    found = []
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and is_ours(match[1]):
            os.unlink(os.path.join(folder, name))
            found.append(name)
    return found


def clear_leftovers(dataset: Path, shards: Iterable[str]) -> None:
    """Delete what killed preparations of a dataset have left. Hold its lock for that."""
    for folder in {(dataset / shard).parent for shard in shards}:
        remove_leftovers(folder, lambda name: name.endswith(_INDEX_SUFFIXES))
    remove_leftovers(dataset / META, lambda name: True)
