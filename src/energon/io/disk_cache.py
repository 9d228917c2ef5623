"""Copies of remote objects on local disk, shared by all processes of a machine.

An entry belongs to one version of one object: its name is a digest of address and version, so a
replaced object never meets an old copy. The least recently used entries make room for new ones.
The folder may be deleted at any time; programs that use it go on and fetch again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from energon.errors import ConfigError
from energon.io.atomic import write_atomic
from energon.io.block_file import BlockFile
from energon.io.settings import StorageSettings
from energon.io.store import Store

CHECK_SHARE = 64
"""After this share of the limit was written, the sizes are looked at again."""


class DiskCache:
    """A folder of copies. May be used by many threads and processes.

    Args:
        folder: Where to keep them; made if it is not there.
        max_bytes: What they may take of the disk together.

    Raises:
        ConfigError: If the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"{folder}: no folder for copies of remote files ({error.strerror}); set "
                "ENERGON_STORAGE_CACHE_DIR to one that can be written"
            ) from error
        self._open: WeakValueDictionary[Path, BlockFile] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._written = 0
        self._checked_at = -1

    def open(self, store: Store, key: str, *, version: str, size: int) -> BlockFile:
        """Return an object as a local file that fills as it is read.

        Args:
            store: Where it comes from.
            key: Which object.
            version: Which version of it.
            size: Bytes of that.
        """
        path = self._path(store.place(key), version)
        with self._lock:
            found = self._open.get(path)
            if found is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                found = self._open[path] = BlockFile(
                    path,
                    size=size,
                    read=partial(store.read_range, key, version=version),
                    stream=partial(store.stream, key, version=version)
                    if not store.gives_ranges
                    else None,
                    written=self._note,
                )
        _touch(path)
        return found

    def keep(self, name: str, version: str, make: Callable[[], bytes]) -> Path:
        """Return the path of a local file that holds what `make` returns.

        It is made when it is not here yet. The caller checks the content, as only that knows its
        format, and calls `discard` if it is damaged.

        Args:
            name: Of what, e.g. an address without secrets.
            version: Differs whenever the content does.
            make: Called at most once, by one process at a time.
        """
        path = self._path(name, version)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_name(f"{path.name}.lock")):
                if not path.exists():
                    content = make()
                    write_atomic(path, content)
                    self._note(len(content))
        _touch(path)
        return path

    def discard(self, path: Path) -> None:
        """Delete an entry."""
        for each in (path, Path(f"{path}.map"), path.with_name(f"{path.name}.lock")):
            each.unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Return what all entries take of the disk."""
        return sum(entry.size for entry in self._entries())

    def trim(self) -> None:
        """Delete the least recently used entries until the rest is within the limit."""
        with _locked(self.folder / "trim.lock"):
            entries = sorted(self._entries(), key=lambda entry: entry.used_at)
            excess = sum(entry.size for entry in entries) - self.max_bytes
            for entry in entries:
                if excess <= 0:
                    return
                self.discard(entry.path)
                excess -= entry.size

    def _path(self, name: str, version: str) -> Path:
        digest = blake2b(f"{name}\0{version}".encode(), digest_size=16).hexdigest()
        return self.folder / digest[:2] / digest[2:]

    def _note(self, count: int) -> None:
        """Count what is written, and make room from time to time."""
        with self._lock:
            self._written += count
            if 0 <= self._checked_at > self._written - self.max_bytes // CHECK_SHARE:
                return
            self._checked_at = self._written
        self.trim()

    def _entries(self) -> Iterator[_Entry]:
        for folder in self.folder.glob("??"):
            for path in folder.iterdir():
                if path.suffix in (".map", ".lock"):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    yield _Entry(path, about.st_blocks * 512, about.st_atime_ns)


class _Entry(NamedTuple):
    path: Path
    size: int
    used_at: int


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _touch(path: Path) -> None:
    """Note that an entry is used, whatever the file system notes by itself."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, ns=(_now(), path.stat().st_mtime_ns))


def _now() -> int:
    import time

    return time.time_ns()


_cache: DiskCache | None = None
_cache_lock = threading.Lock()


def disk_cache() -> DiskCache:
    """Return the cache of this process, where the settings say."""
    global _cache
    settings = StorageSettings.from_environment()
    folder = settings.cache_dir or default_folder()
    with _cache_lock:
        if _cache is None or (_cache.folder, _cache.max_bytes) != (
            Path(folder),
            settings.cache_bytes,
        ):
            _cache = DiskCache(folder, max_bytes=settings.cache_bytes)
        return _cache


def default_folder() -> str:
    """Return where the user's caches are, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "energon")
