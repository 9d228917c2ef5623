"""Write files atomically, and lock them: the whole file appears or none, one process at a time.

A killed process leaves a hidden file beside the one it was writing. Its name is always the same
and its lock ended with the process, so the next writer of the same file reuses it: leftovers
neither pile up nor need a cleanup. A temporary folder that it leaves is deleted by the next process
that needs one for the same purpose.

Use `locked` for a block of code, `FileLock` to try, share or keep a lock, and `hold_lock` or
`hold_byte` for files already open.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self, TypeGuard

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


class ClosesAtExit(ABC):
    """Closed at the end of a `with` block, and aborted after an exception.

    It is closed with a warning when it is collected or the program ends, if nothing else did it.
    Subclasses call `close_at_exit` once they are open.
    """

    is_owned = False
    """Whether another object closes it."""
    _process = 0

    @abstractmethod
    def close(self) -> None:
        """Complete what was written."""

    @abstractmethod
    def abort(self) -> None:
        """Remove whatever is incomplete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    @abstractmethod
    def unfinished(self) -> str | None:
        """What is open, for the warning; None if it is closed."""

    def close_at_exit(self, *files: object) -> None:
        """Close it at the end of this process, but not at that of processes forked from it.

        Args:
            files: The files that `close` needs. In a reference cycle, they would be collected
                before it.
        """
        self._process = os.getpid()
        _open_writers.add(self)
        _kept_files[id(self)] = files

    def close_forgotten(self) -> None:
        """Close it with a warning, if it is open."""
        name = None if self.is_owned or self._process != os.getpid() else self.unfinished
        if name is None:
            return
        advice = f"call close(), or use `with {type(self).__name__}(...) as writer:`"
        try:
            self.close()
        except Exception as error:
            message = f"{name} was not closed, and its end could not be written: {error}; {advice}"
        else:
            message = f"{name} was not closed, and its end was written only now; {advice}"
        warnings.warn(message, ResourceWarning, stacklevel=3, source=self)

    def __del__(self) -> None:
        _kept_files.pop(id(self), None)
        self.close_forgotten()


_open_writers: weakref.WeakSet[ClosesAtExit] = weakref.WeakSet()
_kept_files: dict[int, tuple[object, ...]] = {}


@atexit.register
def _close_forgotten_writers() -> None:
    with ExitStack() as writers:  # closes all, even if warnings are errors
        for writer in _open_writers:
            writers.callback(writer.close_forgotten)


_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a disk that is full, or a user who may not fill more of it."""
_FULL = _NO_SPACE | {errno.EFBIG}
"""Codes of a full disk or quota, and of a file over the size limit."""
_SUFFIX = "._partial"


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a write failed because the disk is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def name_if_full(error: BaseException, path: str | os.PathLike[str]) -> None:
    """Add the path of the file to an error of a full disk: a failed write does not name it."""
    if is_full(error):
        error.filename = os.fspath(path)


def remedy_if_full(error: OSError) -> str:
    """Return the remedy for an error of a full disk; "" for other errors."""
    if error.errno in _NO_SPACE:
        return "free some space"
    return "raise `ulimit -f`, or use another disk," if is_full(error) else ""


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` at the end.

    The content is flushed to disk before the rename. After an exception nothing is left behind.
    Several writers may write the same file at once: the last one to finish wins.
    """
    target = Path(path)
    temporary, descriptor = _create(target)
    try:
        try:
            yield temporary
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            publish(temporary, target, flush=True)
        except BaseException as error:
            name_if_full(error, target)
            temporary.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)


def publish(
    finished: str | os.PathLike[str], target: str | os.PathLike[str], *, flush: bool = False
) -> None:
    """Give a finished file, or folder, its final name: no reader ever sees a part of it.

    Everything that appears at once is renamed here: a file of `atomic_path`, several files that
    belong together, an index that later runs continue, a cached copy, a folder of states.

    Args:
        finished: What was written, on the same file system.
        target: Its final path; an existing file is replaced.
        flush: Whether to flush the file to disk first. Without, after a power failure it may be
            truncated: for files that are flushed already, or checked when they are read.
    """
    if flush:
        with open(finished, "rb") as file:
            os.fsync(file.fileno())
    os.replace(finished, target)


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Replace a whole file; a crash leaves either the old content or the new."""
    with atomic_path(path) as temporary:
        if isinstance(content, str):
            content = content.encode()
        temporary.write_bytes(content)


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Yield a new folder, and delete it at the end, with those of processes that were killed.

    Args:
        purpose: Part of its name.
    """
    prefix = f"energon-{purpose}-"
    if prefix not in _swept:
        _swept.add(prefix)
        _delete_abandoned(prefix)
    with ExitStack() as held:
        while True:
            name = tempfile.mkdtemp(prefix=prefix)
            descriptor = os.open(name, _FOLDER)
            held.callback(os.close, descriptor)
            with suppress(OSError):  # the file system may have no locks
                hold_lock(descriptor)
            if os.path.isdir(name):  # else it was taken for abandoned
                break
        held.callback(shutil.rmtree, name, ignore_errors=True)
        yield Path(name)


_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
_swept: set[str] = set()
"""Beginnings of names of folders, of which this process has deleted the abandoned ones."""


def _delete_abandoned(prefix: str) -> None:
    """Delete the folders of this user that begin with a prefix and that no process has locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            descriptor = os.open(path, _FOLDER)
            try:
                is_own = os.fstat(descriptor).st_uid == os.geteuid()
                if is_own and hold_lock(descriptor, wait=False):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _create(target: Path) -> tuple[Path, int]:
    """Return the path of an empty file beside `target`, and a descriptor that holds its lock."""
    path = target.with_name(f".{target.name}{_SUFFIX}")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        return _create_another(target)  # someone else's, or no file
    try:
        if hold_lock(descriptor, wait=False):
            status = os.fstat(descriptor)
            if _is_ours(status) and os.path.samestat(status, path.stat()):
                os.ftruncate(descriptor, 0)
                return path, descriptor
    except OSError:
        pass  # another process writes it now, or the file system has no locks
    os.close(descriptor)
    return _create_another(target)


def _create_another(target: Path) -> tuple[Path, int]:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    return Path(name), descriptor


def _is_ours(status: os.stat_result) -> bool:
    """Return whether a leftover is a plain file of this user, with no other name."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
