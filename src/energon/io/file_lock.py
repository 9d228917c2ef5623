"""File locks that keep the processes of a machine apart.

A lock ends with the process that holds it, however it ends. Use `locked` for a block of code,
`FileLock` to try, share or keep a lock, and `hold_lock` or `hold_byte` for files already open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class FileLock:
    """A file opened for locking, by one holder or by several that share it.

    Args:
        path: The file.
        create: Whether to create it if it is missing.
        permissions: Permissions of a new file.

    Raises:
        FileNotFoundError: If it is missing and `create` is false, or its folder is missing.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = True, permissions: int = 0o666
    ) -> None:
        self.path = Path(path)
        self.descriptor = -1
        _locks.add(self)
        self.existed = True
        """Whether the file existed before, as after a holder was killed."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            try:
                self.descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, permissions)
                self.existed = False
                return
            except FileExistsError:
                flags |= os.O_CREAT
        self.descriptor = os.open(path, flags, permissions)

    def hold(self, *, wait: bool = True, shared: bool = False) -> bool:
        """Acquire the lock, or change its kind, until `close`; see `hold_lock`."""
        return hold_lock(self.descriptor, wait=wait, shared=shared)

    @property
    def is_at_path(self) -> bool:
        """Whether the path still leads to this file: another holder may have deleted it."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def delete(self) -> None:
        """Delete the file while holding it: `is_at_path` tells others who opened it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock. May be called more than once."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def close_inherited_locks() -> None:
    """Close, in a fork, the locks of its parent, which would last until the fork ends, too."""
    for lock in list(_locks):
        lock.close()


@contextmanager
def locked(path: str | os.PathLike[str], *, deletes: bool = False) -> Iterator[None]:
    """Wait until no other process holds the lock at `path`, and hold it.

    Args:
        path: The lock file, created if missing.
        deletes: Whether to delete the file afterwards. Then, on a file system without locks,
            no process waits, and the block may run twice at once.

    Raises:
        OSError: If the file cannot be written.
    """
    while True:
        lock = FileLock(path)
        try:
            lock.hold()
        except OSError as error:
            if not (deletes and is_unsupported(error)):
                lock.close()
                raise
            break
        if not deletes or lock.is_at_path:
            break
        lock.close()
    try:
        yield
    finally:
        if deletes:
            lock.delete()
        lock.close()


def is_unsupported(error: OSError) -> bool:
    """Return whether an error of `hold` means that the file system has no locks."""
    return error.errno in _UNSUPPORTED


def hold_lock(descriptor: int, *, wait: bool = True, shared: bool = False) -> bool:
    """Lock an open file until it is closed; return whether that succeeded.

    Args:
        descriptor: The file.
        wait: Whether to wait while others hold it.
        shared: Whether others may hold it too, as long as all of them share it.

    Raises:
        OSError: If the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release_lock(descriptor: int) -> None:
    """Release the lock on a file that stays open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def hold_byte(descriptor: int, offset: int, *, wait: bool = False) -> bool:
    """Lock one byte of an open file against other processes; return whether that succeeded."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError:
        return False
    return True


def release_byte(descriptor: int, offset: int) -> None:
    """Release a byte locked by `hold_byte`."""
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, offset)
