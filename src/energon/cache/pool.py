"""What makes lazies: the contract, and the pool that caches nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from energon.cache.lazy import DirectLazy, Lazy, ValueLazy
from energon.sources.files.store import FileStore

T = TypeVar("T")


class CachePool(ABC):
    """Gives files of stores now, or handles to have them later.

    Give one to a loader; cookers marked with `@cooker(need_cache=True)` get it as `cache`. May
    be used by many threads and pickled to workers.
    """

    @abstractmethod
    def get(self, ds: FileStore[T], fname: str, sample: Any = None) -> T:
        """Return a file, as `ds.get` does."""

    @abstractmethod
    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        """Return a handle to a file, and begin to fetch it."""

    @abstractmethod
    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Put a value away, and return the handle that gives it back.

        Args:
            data: The value.
            name: How messages call it.
        """

    def close(self) -> None:  # noqa: B027 - most pools hold nothing
        """Free what the pool holds. Lazies that it made still work, without a cache."""


class NoCachePool(CachePool):
    """Caches nothing: lazies read from their store when the file is wanted."""

    def get(self, ds: FileStore[T], fname: str, sample: Any = None) -> T:
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        return DirectLazy(ds, fname, self)

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        return ValueLazy(data, name)


_ACTIVE: ContextVar[CachePool | None] = ContextVar("cache pool", default=None)
_NO_POOL = NoCachePool()


def active_pool() -> CachePool:
    """Return the pool of the loader that runs the hook which asks; without one, no cache."""
    return _ACTIVE.get() or _NO_POOL


@contextmanager
def activated(pool: CachePool | None) -> Iterator[None]:
    """Make `pool` the one that hooks get, in this thread and until the end of the block."""
    token = _ACTIVE.set(pool)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
