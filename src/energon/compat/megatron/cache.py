"""The cache pool with the attributes by which programs watch it: folder, entries, paths."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from energon.cache import file_pool as core
from energon.cache.pool import Lazy
from energon.cache.prefetch import Step, Task, Ticket
from energon.sources.files.store import FileStore

T = TypeVar("T")


class FileStoreCachePool(core.FileStoreCachePool):
    """Fetches files to local disk in the background, see `energon.FileStoreCachePool`."""

    @property
    def cache_dir(self) -> Path | None:
        """The folder, shared by all workers of a loader; None while the disk has no room."""
        return self._open().disk.path

    def get_lazy(self, ds: FileStore[T], fname: str) -> Lazy[T]:
        return FileCacheLazy(ds, fname, self, self._open().ask(ds, fname))

    def to_cache(self, data: T, name: str) -> Lazy[T]:
        lazy = super().to_cache(data, name)
        if isinstance(lazy, core.KeptLazy):
            return CacheFileLazy(lazy._ticket, name, self)
        return lazy


class FileCacheLazy(core.FileCacheLazy[T]):
    """A file that is being fetched to local disk, see `energon.FileCacheLazy`."""

    __slots__ = ("entry",)

    def __init__(
        self, ds: FileStore[T], fname: str, pool: core.FileStoreCachePool, ticket: Ticket
    ) -> None:
        super().__init__(ds, fname, pool, ticket)
        assert ticket.task is not None
        self.entry = CacheEntry(ticket.task)


class CacheFileLazy(core.KeptLazy[T]):
    """A value on local disk."""

    __slots__ = ()
    pool: core.FileStoreCachePool

    @property
    def cache_path(self) -> Path | None:
        """Its file, which has a header before the value; None as long as there is none."""
        task = self._ticket.task
        if task is None or task.step is not Step.KEPT:
            return None
        return self.pool._open().disk.pinned_path(task.key)


class CacheEntry:
    """A requested file, shared by all lazies of it in this process. It is its own future.

    Args:
        task: The request.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def send_to_cache_future(self) -> CacheEntry:
        """What can be asked whether the file has been fetched."""
        return self

    @property
    def refcount(self) -> int:
        """How many lazies wait for it."""
        return self._task.users

    @property
    def data_size(self) -> int:
        """Its size in bytes while it is in memory; 0 before and after."""
        content = self._task.content
        return 0 if content is None else len(content[0])

    def done(self) -> bool:
        """Return whether it has been fetched, or will not be."""
        return self._task.fetched.is_set()

    def result(self, timeout: float | None = None) -> None:
        """Wait until it has been fetched.

        Raises:
            TimeoutError: If that takes longer than `timeout` seconds.
        """
        if not self._task.fetched.wait(timeout):
            raise TimeoutError(f"{self._task.name} was not fetched within {timeout} s")

    def cancel(self) -> bool:
        """Return False: a file is fetched only if a lazy still waits for it."""
        return False
