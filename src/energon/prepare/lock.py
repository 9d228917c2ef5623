"""Let one process at a time write a dataset, and clear away what killed ones have left."""

from __future__ import annotations

import errno
import fcntl
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
from energon.formats.meta.info import META
from energon.prepare.files import reporting

log = logging.getLogger("energon")
POLL_SECONDS = 0.2
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def dataset_lock(dataset: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the right to write a dataset. It ends with the process, however that ends.

    Gives whether the last process that held it was killed: then nobody knows what it has done.

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
    descriptor, is_left = _acquire(path, dataset, wait=wait)
    try:
        yield is_left
    finally:
        if descriptor is not None:
            # Deleted before it is let go: who opened it meanwhile sees that it is gone.
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path, dataset: Path, *, wait: bool) -> tuple[int | None, bool]:
    """Return a descriptor that holds the lock, and whether its file was there already."""
    while True:
        with reporting(path):
            descriptor, is_left = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if not wait:
                raise DatasetBusyError(
                    f"{dataset}: {holder} is writing it now; wait until that is done, or pass "
                    "--wait"
                ) from error
            time.sleep(POLL_SECONDS)
            continue
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning(
                "%s: this file system has no locks; see to it that only one process at a time "
                "prepares the dataset",
                dataset,
            )
            return None, False
        if _is_same_file(descriptor, path):
            _sign(descriptor)
            return descriptor, is_left
        os.close(descriptor)  # the process that held it has deleted it meanwhile


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), False
    except FileExistsError:
        return os.open(path, flags, 0o666), True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Note who holds the lock; on a full disk nobody does."""
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, about.encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
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
