"""A cache pool on local disk."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from uuid import uuid4

from energon.cache.codec import DecodedForm, Form, RawForm, decode, encode
from energon.cache.contents import CacheLimits, SharedContents, delete_abandoned_folders
from energon.cache.pool import CachePool, Lazy, ValueLazy
from energon.cache.prefetch import Prefetcher, Ticket
from energon.errors import ConfigError
from energon.samples.provenance import add_source_info
from energon.sources.files.store import FileStore

T = TypeVar("T")

logger = logging.getLogger("energon")

_FORMS: dict[str, type[Form]] = {
    "raw": RawForm,
    "decoded": DecodedForm,
    "pickle": DecodedForm,
}


class FileStoreCachePool(CachePool):
    """Fetches files to local disk in the background, ahead of their use.

    All workers of a loader share one folder and its limits. Files that no reader waits for stay
    until their room is needed; the least recently used ones go first. The folder is deleted by
    its last user; if that was killed, by the next program that uses the same `parent_cache_dir`.
    If the disk has no room, files are read from their stores: the cache affects speed, never
    results.

    Args:
        parent_cache_dir: Folder on a local disk; None for the system's temporary folder.
        num_workers: Number of files each process fetches at a time.
        max_cache_size_gbytes: Maximum size in GiB, for all workers of the loader together.
        max_cache_count: Maximum number of files.
        method: "raw" stores files as they are; "decoded" stores the values they are decoded to,
            if those consist of numbers, text, bytes, arrays and tensors. "pickle" is an old name
            of "decoded"; nothing is pickled.
        name: Loaders of one user on one machine that use the same name share a folder; None
            shares it among the workers of one loader only.

    Raises:
        ConfigError: If an argument is invalid.

    Example:
        >>> from energon import SystemFileStore
        >>> pool = FileStoreCachePool(max_cache_size_gbytes=1)
        >>> store = SystemFileStore(".")
        >>> [len(pool.get(store, "clip.mp4")) > 0 for _ in range(2)], pool.stats()
        ([True, True], {'hits': 1, 'misses': 1})
        >>> pool.close()
    """

    def __init__(
        self,
        *,
        parent_cache_dir: str | os.PathLike[str] | None = None,
        num_workers: int = 8,
        max_cache_size_gbytes: float = 1024,
        max_cache_count: int = 10_000_000,
        method: str = "raw",
        name: str | None = None,
    ) -> None:
        for argument, value in (
            ("num_workers", num_workers),
            ("max_cache_size_gbytes", max_cache_size_gbytes),
            ("max_cache_count", max_cache_count),
        ):
            if not value > 0:
                raise ConfigError(f"{argument} must be above 0, got {value!r}")
        if method not in _FORMS:
            raise ConfigError(f"method={method!r}: expected one of {', '.join(_FORMS)}")
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(f"name={name!r}: expected a word of letters, digits, _ and -")
        self.parent_cache_dir = parent_cache_dir
        self.num_workers = num_workers
        self.limits = CacheLimits(int(max_cache_size_gbytes * (1 << 30)), max_cache_count)
        self.method = method
        self.name = name or uuid4().hex
        self._form = _FORMS[method]()
        self._lock = Lock()
        self._prefetcher: Prefetcher | None = None
        self._taken: Counter[str] = Counter()
        self._pid = -1
        self._parent = Path(parent_cache_dir or tempfile.gettempdir())
        # Worker processes that used the folder were killed at their end.
        weakref.finalize(self, delete_abandoned_folders, self._parent)

    def get(self, ds: FileStore[T], fname: str, sample: Any = None) -> T:
        data, source = self._open().look(ds, fname)
        if sample is not None:
            add_source_info(sample, source)
        return self._form.value(ds, fname, data)  # type: ignore[no-any-return]

    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        return FileCacheLazy(ds, fname, self, self._open().ask(ds, fname))

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        try:
            encoded = encode(data)
        except TypeError as error:
            logger.warning("%s stays in memory: %s", name, error)
            return ValueLazy(data, name)
        return KeptLazy(self._open().keep(encoded), name, self)

    def usage(self) -> tuple[int, int]:
        """Return the size in bytes and the number of files in the shared folder."""
        return self._open().disk.usage()

    def stats(self) -> dict[str, int]:
        """Return how many files came from the cache ("hits") and from stores ("misses")."""
        counts = self._open().counts
        return {"hits": counts["hits"], "misses": counts["misses"]}

    def take_counts(self) -> Mapping[str, int]:
        prefetcher = self._prefetcher
        if prefetcher is None or self._pid != os.getpid():
            return {}
        with self._lock:
            total = prefetcher.counts + Counter({"failed": prefetcher.disk.refused})
            news = total - self._taken
            self._taken = total
        return news

    def close(self) -> None:
        if self._prefetcher is not None and self._pid == os.getpid():
            self._prefetcher.close()
        self._prefetcher = None
        delete_abandoned_folders(self._parent)

    def __reduce__(self) -> Any:
        settings = {
            "parent_cache_dir": self.parent_cache_dir,
            "num_workers": self.num_workers,
            "max_cache_size_gbytes": self.limits.max_bytes / (1 << 30),
            "max_cache_count": self.limits.max_count,
            "method": self.method,
            "name": self.name,
        }
        return _make_pool, (type(self), settings)

    def _open(self) -> Prefetcher:
        """Return the prefetcher of this process. A fork creates its own for the same folder."""
        prefetcher = self._prefetcher
        if prefetcher is None or self._pid != os.getpid():
            with self._lock:
                if self._prefetcher is None or self._pid != os.getpid():
                    disk = SharedContents(self._parent, self.name, self.limits)
                    self._prefetcher = Prefetcher(disk, self._form, self.num_workers)
                    weakref.finalize(self, self._prefetcher.close)
                    self._pid = os.getpid()
                    self._taken = Counter()
                prefetcher = self._prefetcher
        return prefetcher


def _make_pool(kind: type[FileStoreCachePool], settings: dict[str, Any]) -> FileStoreCachePool:
    return kind(**settings)


class FileCacheLazy(Lazy[T]):
    """A file that is being fetched to local disk.

    The first `get` releases the fetched file, as does garbage collection of the lazy; later calls
    read it from disk if it is still there, else from the store.

    Example:
        >>> from energon import SystemFileStore
        >>> pool = FileStoreCachePool()
        >>> lazy = pool.get_lazy(SystemFileStore("."), "clip.mp4")
        >>> lazy
        FileCacheLazy('clip.mp4')
        >>> lazy.get()[4:8]
        b'ftyp'
        >>> pool.close()
    """

    __slots__ = ("_ticket",)
    pool: FileStoreCachePool

    def __init__(
        self, ds: FileStore[T], fname: str, pool: FileStoreCachePool, ticket: Ticket
    ) -> None:
        super().__init__(ds, fname, pool)
        self._ticket: Ticket | None = ticket

    def get(self, sample: Any = None) -> T:
        pool = self.pool
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return pool.get(self.ds, self.fname, sample)
        data, source = ticket.take()
        ticket.close()
        if sample is not None:
            add_source_info(sample, source)
        return pool._form.value(self.ds, self.fname, data)  # type: ignore[no-any-return]


class KeptLazy(Lazy[T]):
    """A value stored on local disk."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: Ticket, name: str, pool: FileStoreCachePool) -> None:
        self.fname = self._name = name
        self.pool = pool
        self._ticket = ticket

    def get(self, sample: Any = None) -> T:
        data, _ = self._ticket.take()
        return decode(data)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return ValueLazy, (self.get(), self.fname)

    @property
    def _identity(self) -> Hashable:
        return id(self)
