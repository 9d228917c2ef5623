"""Copies of remote objects on local disk, shared by all processes of a machine.

An entry belongs to one version of one object: its name is a digest of address and version, so a
replaced object never meets an old copy. The least recently used entries make room for new ones.
The folder may be deleted at any time: programs that use it fetch again and continue, as they do
when an entry is damaged or the disk is full. Only speed depends on the cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from energon.errors import ConfigError, EnergonError, FormatError
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import write_atomic
from energon.io.backends.base import ObjectInfo
from energon.io.block_file import BlockFile, UncachedFile
from energon.io.file_lock import locked
from energon.io.settings import StorageSettings
from energon.io.store import Store
from energon.messages import warn_once

logger = logging.getLogger("energon")

T = TypeVar("T")

CHECK_SHARE = 64
"""Sizes are checked again after this share of the limit has been written."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that is full."""
_CHECKSUM_BYTES = 1 << 20
_BESIDE = (".map", ".lock", ".sum")
"""Suffixes of the files beside the content of an entry."""


class DiskCache:
    """A folder of copies. May be used by many threads and processes.

    Args:
        folder: Where to store them; created if missing.
        max_bytes: Maximum disk space of all copies together.

    Raises:
        ConfigError: If the folder cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._open: WeakValueDictionary[Path, BlockFile] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._written = 0
        self._checked_at = -1
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            if error.errno in FULL:
                self._warn(error)
                return
            raise ConfigError(
                f"{folder}: cannot store copies of remote files here ({error.strerror}); set "
                "ENERGON_STORAGE_CACHE_DIR to a writable folder"
            ) from error

    def open(self, store: Store, key: str, *, version: str, size: int) -> BlockFile | UncachedFile:
        """Return an object as a local file that fills as it is read.

        If it cannot be written to disk, every read goes to its store.

        Args:
            store: The store that has the object.
            key: Its key.
            version: Its version.
            size: Its size in bytes.
        """
        path = self._path(store.place(key), version)
        read = partial(store.read_range, key, version=version)
        whole = partial(store.stream, key, version=version, size=size)
        stream, count = None if store.gives_ranges else whole, store.statistics.add
        with self._lock:
            found = self._open.get(path)
            try:
                if found is None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found = self._open[path] = BlockFile(
                        path,
                        size=size,
                        read=read,
                        stream=stream,
                        written=self._note,
                        failed=self._warn,
                        count=count,
                    )
            except OSError as error:
                self._warn(error)
                return UncachedFile(size=size, read=read, stream=stream, count=count)
        _touch(path)
        return found

    def keep(self, name: str, version: str, make: Callable[[], bytes]) -> Path | bytes:
        """Return the path of a local file that holds what `make` returns.

        `make` is called if the file is missing or damaged.

        Args:
            name: Identifies the content, for example an address without secrets.
            version: Differs whenever the content does.
            make: Called at most once, by one process at a time.

        Returns:
            The content itself if it cannot be written to disk.
        """
        path = self._path(name, version)
        content = None
        try:
            if not _is_whole(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with locked(path.with_name(f"{path.name}.lock")):
                    if not _is_whole(path):
                        content = make()
                        write_atomic(path, content)
                        _note_checksum(path, zlib.crc32(content))
                        self._note(len(content))
            _touch(path)
            return path
        except OSError as error:
            if isinstance(error, EnergonError):
                raise
            self._warn(error)
        return make() if content is None else content

    def keep_for(self, address: str, about: ObjectInfo, make: Callable[[], bytes]) -> Path | bytes:
        """Store what belongs beside a file in a read-only place, see `keep`.

        Args:
            address: Where it would have been written.
            about: The file it is derived from; another version of that makes it stale.
            make: Returns the content.
        """
        name = redact(address) if is_remote(address) else os.path.abspath(local_path(address))
        return self.keep(name, f"{about.size}-{about.version or about.mtime_ns}", make)

    def load(
        self, name: str, version: str, make: Callable[[], bytes], parse: Callable[[Any], T]
    ) -> T:
        """Return `parse` of a cached content, see `keep`.

        Args:
            name: Identifies the content.
            version: Differs whenever the content does.
            make: Returns the content. Called again if the cached content cannot be parsed.
            parse: Called with the bytes, which are memory-mapped.

        Raises:
            FormatError: If `parse` raises it for what `make` has just returned.
        """
        kept = self.keep(name, version, make)
        if isinstance(kept, Path):
            with contextlib.suppress(FormatError, OSError):
                return parse(map_file(kept))
            self.discard(kept)
            kept = self.keep(name, version, make)
        return parse(map_file(kept) if isinstance(kept, Path) else kept)

    def discard(self, path: Path) -> None:
        """Delete an entry."""
        for each in (path, *(Path(f"{path}{ending}") for ending in _BESIDE)):
            each.unlink(missing_ok=True)

    def trim(self) -> None:
        """Delete the least recently used entries until the rest is within the limit."""
        with locked(self.folder / "trim.lock"):
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
        """Count what was written, and make room from time to time."""
        with self._lock:
            self._written += count
            if 0 <= self._checked_at > self._written - self.max_bytes // CHECK_SHARE:
                return
            self._checked_at = self._written
        with contextlib.suppress(OSError):
            self.trim()

    def _entries(self) -> Iterator[_Entry]:
        for folder in self.folder.glob("??"):
            for path in folder.iterdir():
                if path.suffix in _BESIDE:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    yield _Entry(path, about.st_blocks * 512, about.st_atime_ns)

    def _warn(self, error: OSError) -> None:
        warn_once(
            logger,
            f"disk cache {self.folder}",
            "%s takes no copies of remote files (%s), which are read from their stores instead. "
            "Free some space there, set ENERGON_STORAGE_CACHE_BYTES to less than the disk has, or "
            "ENERGON_STORAGE_CACHE_DIR to another folder",
            self.folder,
            error.strerror or error,
        )


class _Entry(NamedTuple):
    path: Path
    size: int
    used_at: int


def _touch(path: Path) -> None:
    """Record that an entry was used, whether or not the file system tracks access times."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def map_file(path: Path) -> Any:
    """Return the bytes of a file, mapped into memory."""
    with open(path, "rb") as file:
        # What is empty cannot be mapped.
        is_empty = not os.fstat(file.fileno()).st_size
        return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _note_checksum(path: Path, checksum: int) -> None:
    about = path.stat()
    write_atomic(f"{path}.sum", f"{about.st_size} {about.st_mtime_ns} {checksum}")


def _is_whole(path: Path) -> bool:
    """Return whether an entry is present and intact."""
    try:
        about = path.stat()
        size, mtime_ns, checksum = map(int, Path(f"{path}.sum").read_text().split())
    except (OSError, ValueError):
        return False
    if about.st_size != size:
        return False
    if about.st_mtime_ns == mtime_ns:
        return True
    # Someone has written to it, or only copied it.
    found = 0
    with open(path, "rb") as file:
        while data := file.read(_CHECKSUM_BYTES):
            found = zlib.crc32(data, found)
    if found == checksum:
        _note_checksum(path, checksum)
    return found == checksum


_cache: DiskCache | None = None
_cache_lock = threading.Lock()


def disk_cache() -> DiskCache:
    """Return the cache of this process, in the folder that the settings name."""
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
    """Return the folder for the user's caches, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "energon")
