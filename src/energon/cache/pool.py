"""The contract of cache pools and their lazies, and the pool that caches nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from energon.sources.files.store import FileStore

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # A sample type that does not name the type of its lazies has lazies of Any.
    T = TypeVarWithDefault("T", default=Any)
else:
    T = TypeVar("T")


class Lazy(ABC, Generic[T]):
    """A handle to a file of a store that is needed later.

    Lazies of the same file of the same store are equal.

    Args:
        ds: The store.
        fname: Name of the file.
        pool: The pool that made the lazy; None without one.

    Example:
        >>> from energon import NoCachePool, SystemFileStore
        >>> store, pool = SystemFileStore("."), NoCachePool()
        >>> video = pool.get_lazy(store, "clip.mp4")
        >>> video == pool.get_lazy(store, "clip.mp4"), len(video.get()) > 0
        (True, True)
    """

    __slots__ = ("__weakref__", "_name", "ds", "fname", "pool")

    def __init__(self, ds: FileStore[T], fname: str, pool: object) -> None:
        self.ds = ds
        self.fname = fname
        self.pool = pool
        self._name = ds.full_name(fname)

    @abstractmethod
    def get(self, sample: Any = None) -> T:
        """Return the file, as `FileStore.get` does. May be called again.

        Args:
            sample: Its `__sources__` get the file added; None records it nowhere.

        Raises:
            NoSuchFileError: If the store has no such file.
        """

    def __reduce__(self) -> Any:
        # The cache belongs to this process; the store is reachable from any.
        return DirectLazy, (self.ds, self.fname, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    @property
    def _identity(self) -> Hashable:
        return self.ds.decoded_identity, self._name


class DirectLazy(Lazy[T]):
    """A lazy that reads the file from its store on each `get`.

    Example:
        >>> from energon import SystemFileStore
        >>> DirectLazy(SystemFileStore("."), "clip.mp4", None).get()[4:8]
        b'ftyp'
    """

    __slots__ = ()

    def get(self, sample: Any = None) -> T:
        return self.ds.get(self.fname, sample)


class MockLazy(Lazy[T]):
    """A lazy that calls a function; for tests, and for values that are not files.

    Args:
        fname: Its name.
        get_fn: Called with the name for each `get`.

    Example:
        >>> MockLazy("clip.mp4", lambda name: f"what is in {name}").get()
        'what is in clip.mp4'
    """

    __slots__ = ("get_fn",)

    def __init__(self, fname: str, get_fn: Callable[[str], T]) -> None:
        self.fname = self._name = fname
        self.get_fn = get_fn

    def get(self, sample: Any = None) -> T:
        return self.get_fn(self.fname)

    def __reduce__(self) -> Any:
        return MockLazy, (self.fname, self.get_fn)

    @property
    def _identity(self) -> Hashable:
        return MockLazy, self.fname


class ValueLazy(Lazy[T]):
    """A value that was passed to a pool and is kept in memory."""

    __slots__ = ("value",)

    def __init__(self, value: T, name: str) -> None:
        self.fname = self._name = name
        self.value = value

    def get(self, sample: Any = None) -> T:
        return self.value

    def __reduce__(self) -> Any:
        return ValueLazy, (self.value, self.fname)

    @property
    def _identity(self) -> Hashable:
        return id(self)


class CachePool(ABC):
    """Reads files of stores now, or returns handles for reading them later.

    Give one to a loader; cookers marked with `@cooker(need_cache=True)` get it as `cache`. May
    be used by many threads and pickled to workers.

    Example:
        >>> from energon import FileStoreCachePool, SystemFileStore
        >>> pool: CachePool = FileStoreCachePool()
        >>> lazy = pool.get_lazy(SystemFileStore("."), "clip.mp4")
        >>> lazy.get()[4:8]
        b'ftyp'
        >>> pool.close()
    """

    @abstractmethod
    def get(self, ds: FileStore[T], fname: str, sample: Any = None) -> T:
        """Return a file, as `ds.get` does."""

    @abstractmethod
    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        """Return a handle to a file, and start fetching it."""

    @abstractmethod
    def to_cache(self, data: T, name: str) -> Lazy[T]:
        """Store a value, and return the handle that reads it back.

        Args:
            data: The value.
            name: Its name in messages.
        """

    def take_counts(self) -> Mapping[str, int]:
        """Return the counts since the last call: hits, misses, and failed writes."""
        return {}

    def close(self) -> None:  # noqa: B027 - most pools hold nothing
        """Free the pool's resources. Its lazies still work, without a cache."""


class NoCachePool(CachePool):
    """Caches nothing: lazies read from their store on each `get`.

    Example:
        >>> from energon import SystemFileStore
        >>> NoCachePool().get_lazy(SystemFileStore("."), "clip.mp4")
        DirectLazy('clip.mp4')
    """

    def get(self, ds: FileStore[T], fname: str, sample: Any = None) -> T:
        return ds.get(fname, sample)

    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        return DirectLazy(ds, fname, self)

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        return ValueLazy(data, name)


_ACTIVE: ContextVar[CachePool | None] = ContextVar("cache pool", default=None)
_NO_POOL = NoCachePool()


def active_pool() -> CachePool:
    """Return the pool of the loader that runs the calling hook, or a pool that caches nothing."""
    return _ACTIVE.get() or _NO_POOL


@contextmanager
def activated(pool: CachePool | None) -> Iterator[None]:
    """Make `pool` the active one in this thread, until the end of the block."""
    token = _ACTIVE.set(pool)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
