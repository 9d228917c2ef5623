"""Contents by key on local disk, shared by all processes that use one folder.

Each file begins with its length and checksum, so that truncated or overwritten files are noticed
and fetched again. A disk that is full or failing is not used for a while, as if there were no
cache.

The folder lives as long as it has users. Every user holds a shared lock on a file in it, which the
system releases however the process ends. The first user starts a janitor: a process that waits
for an exclusive lock and then removes the folder. So nothing is left even if all users are killed
at once; and if the janitor is killed with them, the next user of the same parent folder cleans up.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from threading import Lock
from typing import Literal
from uuid import uuid4

from energon.cache.catalog import CONTENTS, CacheLimits, Catalog
from energon.errors import ConfigError, EnergonError
from energon.io.atomic import is_full, publish
from energon.io.file_lock import FileLock

FOLDER_PREFIX = "energon-cache-"
_LOCK = "lock"

_JANITOR = """
import fcntl, os, shutil, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
# If the folder was removed and created again, it belongs to another janitor.
if os.path.samestat(os.fstat(lock), os.stat(sys.argv[1])):
    shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)
"""


class SharedFolder:
    """A folder that this process and others use, until `leave`.

    Args:
        parent: The folder to create it in; None for the system's temporary folder.
        name: Processes that use the same name share the folder.

    Raises:
        ConfigError: If the parent is not writable.
        OSError: If the disk is full.
    """

    def __init__(self, parent: str | os.PathLike[str] | None, name: str) -> None:
        root = Path(tempfile.gettempdir() if parent is None else parent)
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_abandoned(root)
            self.path = root / f"{FOLDER_PREFIX}{os.getuid()}-{name}"
            self._lock: FileLock | None = self._join()
        except OSError as error:
            if is_full(error):
                raise
            raise ConfigError(
                f"{root}: cannot be used for a cache: {error}; name a folder on a local disk with "
                "parent_cache_dir"
            ) from error

    def leave(self) -> None:
        """Stop using the folder. The last user's departure removes it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove_if_unused(lock)

    def _join(self) -> FileLock:
        while True:
            # Private to this user: cached data may be confidential.
            self.path.mkdir(mode=0o700, exist_ok=True)
            path = self.path / _LOCK
            try:
                lock = FileLock(path, permissions=0o600)
            except FileNotFoundError:
                continue  # the last user has left and removed the folder
            first = lock.hold(wait=False)
            lock.hold(shared=True)
            if lock.is_at_path:
                if first:
                    _start_janitor(path)
                return lock
            lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user below `parent` that nobody uses any more."""
    for path in parent.glob(f"{FOLDER_PREFIX}{os.getuid()}-*"):
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
        # In its own process group: a signal to ours must not kill the janitor.
        start_new_session=True,
    )
    # It outlives this process on purpose, so suppress the ResourceWarning.
    process.returncode = 0


CACHE_RETRY_SECONDS = 30.0
"""How long not to write to a disk that was full."""
_MAGIC = b"ENC1"
_HEADER = struct.Struct("<4sIQ")

Stored = Literal["stored", "present", "full", "failed"]


class SharedContents:
    """Contents in a folder that is removed with its last user. May be used by many threads.

    Args:
        parent: The folder to create it in; None for the system's temporary folder.
        name: Processes that use the same name share the folder.
        limits: Limits for all processes together.

    Raises:
        ConfigError: If the parent is not writable for another reason than a full disk.
    """

    def __init__(
        self, parent: str | os.PathLike[str] | None, name: str, limits: CacheLimits
    ) -> None:
        self.limits = limits
        self.refused = 0
        self._parent = parent
        self._name = name
        self._folder: SharedFolder | None = None
        self._open: Catalog | None = None
        self._mutex = Lock()
        self._retry_at = 0.0
        self._undropped: list[str] = []
        self._closed = False
        self._catalog()

    @property
    def path(self) -> Path | None:
        """The folder; None while the disk has no room for it."""
        return None if self._folder is None else self._folder.path

    def find(self, key: str, *, pin: bool) -> str | None:
        """Return the note stored with a content; None if absent.

        Args:
            key: Its key.
            pin: Whether to keep it until `release`.
        """
        catalog = self._catalog()
        try:
            return None if catalog is None else catalog.find(key, pin=pin)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            return None

    def read(self, key: str) -> bytes | None:
        """Return a content found or stored before; None if it is gone or damaged."""
        catalog, inode = self._catalog(), None
        if catalog is None:
            return None
        try:
            with open(catalog.path(key), "rb") as file:
                about = os.fstat(file.fileno())
                inode = about.st_ino
                magic, checksum, size = _HEADER.unpack(file.read(_HEADER.size))
                if (magic, size) == (_MAGIC, about.st_size - _HEADER.size):
                    data = file.read(size)
                    if zlib.crc32(data) == checksum:
                        return data
        except (OSError, struct.error):
            pass
        try:
            catalog.discard_lost(key, inode)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
        return None

    def store(self, key: str, data: bytes, about: str) -> Stored:
        """Keep a content until `release`, and longer if there is room.

        Args:
            key: Its key.
            data: The content.
            about: A note to store with it.

        Returns:
            "full" if there is no room until something is released, "present" if another process
            has stored it or is about to, "failed" if it cannot be written to disk.
        """
        catalog = self._catalog()
        if catalog is None or self._is_resting():
            self.refused += 1
            return "failed"
        if len(data) > self.limits.max_bytes:
            return "failed"
        self._drop_again()
        try:
            reserved = catalog.reserve(key, len(data))
            if reserved != "reserved":
                return reserved
            self._write(catalog, key, data)
            catalog.written(key, about)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            self.drop(key)
            self.refused += 1
            return "failed"
        return "stored"

    def release(self, keys: list[str]) -> bool:
        """Allow contents to be dropped for room. Return False if that has to be retried."""
        catalog = self._catalog()
        try:
            if catalog is not None:
                catalog.release(keys)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            return False
        return True

    def drop(self, key: str) -> None:
        """Delete a content, later if the disk is too full even to record that."""
        catalog = self._catalog()
        try:
            if catalog is not None:
                catalog.discard(key)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            with self._mutex:
                self._undropped.append(key)

    def _drop_again(self) -> None:
        if self._undropped:
            with self._mutex:
                keys, self._undropped = self._undropped, []
            for key in keys:
                self.drop(key)

    def usage(self) -> tuple[int, int]:
        """Return the size in bytes and the number of contents, of all processes."""
        catalog = self._catalog()
        self._drop_again()
        try:
            return (0, 0) if catalog is None else catalog.usage()
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            return 0, 0

    def close(self) -> None:
        """Stop using the folder."""
        with self._mutex:
            self._closed = True
        try:
            if self._open is not None:
                self._open.close()
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
        finally:
            if self._folder is not None:
                self._folder.leave()

    def _catalog(self) -> Catalog | None:
        """Return the catalog, created as soon as the disk has room for it."""
        if self._open is not None:
            return self._open
        with self._mutex:
            if self._open is None and not self._closed and not self._is_resting():
                try:
                    if self._folder is None:
                        self._folder = SharedFolder(self._parent, self._name)
                    self._open = Catalog(self._folder.path, self.limits, uuid4().hex)
                except (OSError, sqlite3.Error) as error:
                    if isinstance(error, EnergonError):
                        raise
                    self._warn(error)
            return self._open

    def _is_resting(self) -> bool:
        return time.monotonic() < self._retry_at

    def _write(self, catalog: Catalog, key: str, data: bytes) -> None:
        path = catalog.path(key)
        temporary = path.with_name(f"{key}.{catalog.user}")
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (_HEADER.pack(_MAGIC, zlib.crc32(data), len(data)), data):
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
            publish(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _warn(self, error: OSError | sqlite3.Error) -> None:
        self._retry_at = time.monotonic() + CACHE_RETRY_SECONDS
        CONTENTS.warn(self.path or self._parent or tempfile.gettempdir(), error)
