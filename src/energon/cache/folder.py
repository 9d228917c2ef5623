"""A folder on local disk that lives as long as somebody uses it.

Every user holds a shared lock on a file in it, which the system releases however the process
ends. The first one starts a janitor: a process that waits for the lock to itself and removes
the folder then. So even after all users were killed at once nothing is left; and should the
janitor be killed with them, the next user of the same parent folder cleans up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from energon.errors import ConfigError
from energon.io.disk_cache import FULL
from energon.io.file_lock import FileLock

PREFIX = "energon-cache-"
_LOCK = "lock"

_JANITOR = """
import fcntl, os, shutil, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
# The folder may have been removed and made again, which is none of this janitor's business.
if os.path.samestat(os.fstat(lock), os.stat(sys.argv[1])):
    shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)
"""


class SharedFolder:
    """A folder that this process and others use, until `leave`.

    Args:
        parent: Where it is made; None for the system's folder of temporary files.
        name: Which one; processes that give the same name share it.

    Raises:
        ConfigError: If nothing can be written there.
        OSError: If the disk is full.
    """

    def __init__(self, parent: str | os.PathLike[str] | None, name: str) -> None:
        root = Path(tempfile.gettempdir() if parent is None else parent)
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_abandoned(root)
            self.path = root / f"{PREFIX}{os.getuid()}-{name}"
            self._lock: FileLock | None = self._join()
        except OSError as error:
            if error.errno in FULL:
                raise
            raise ConfigError(
                f"{root}: cannot be used for a cache: {error}; name a folder on a local disk with "
                "parent_cache_dir"
            ) from error

    def leave(self) -> None:
        """Stop using the folder. The last one to do so removes it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove_if_unused(lock)

    def _join(self) -> FileLock:
        while True:
            # Readable by nobody else: what is cached may be confidential.
            self.path.mkdir(mode=0o700, exist_ok=True)
            path = self.path / _LOCK
            try:
                lock = FileLock(path, permissions=0o600)
            except FileNotFoundError:
                continue  # the last user left meanwhile and removed the folder
            first = lock.hold(wait=False)
            lock.hold(shared=True)
            if lock.is_at_path:
                if first:
                    _start_janitor(path)
                return lock
            lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user below `parent` that nobody uses any more."""
    for path in parent.glob(f"{PREFIX}{os.getuid()}-*"):
        try:
            lock = FileLock(path / _LOCK, create=False)
        except OSError:
            continue
        _remove_if_unused(lock)


def _remove_if_unused(lock: FileLock) -> None:
    with lock:
        if lock.hold(wait=False) and lock.is_at_path:
            shutil.rmtree(lock.path.parent, ignore_errors=True)


def _start_janitor(lock: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _JANITOR, str(lock)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # Not in the group of this process: what kills that should not kill the janitor.
        start_new_session=True,
    )
    # It outlives this process, which is not to be complained about.
    process.returncode = 0
