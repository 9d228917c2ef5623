"""A cache pool on local disk, which threads fill in the background, ahead of the use of files."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from energon.cache.contents import (
    CachedContent,
    CacheLimits,
    DecodedForm,
    Form,
    RawForm,
    SharedContents,
    decode,
    delete_abandoned_folders,
    encode,
)
from energon.cache.pool import CachePool, Lazy, ValueLazy
from energon.errors import ConfigError, NoSuchFileError
from energon.io.threads import fork_safe_lock
from energon.samples.provenance import SourceInfo, add_source_info
from energon.sources.files.store import FileStore


class Step(Enum):
    """The state of a file on its way to disk."""

    QUEUED = 0
    FETCHING = 1
    FETCHED = 2  # in memory, on its way to the disk
    KEPT = 3
    ABSENT = 4  # not in the cache: to be read from the store


class Task:
    """A requested file and its state."""

    __slots__ = ("content", "fetched", "key", "name", "step", "store", "users")

    def __init__(self, store: FileStore[Any] | None, name: str, key: str) -> None:
        self.store = store
        self.name = name
        self.key = key
        self.step = Step.QUEUED
        self.content: CachedContent | None = None
        self.fetched = threading.Event()
        self.users = 0


PREFETCH_CLOSE_SECONDS = 5.0
"""How long to wait at the end for threads that read from a store."""
ROOM_SECONDS = 0.05
"""How often to try a full cache again: other processes make room without notice."""

_VALUE = "value-"
_NOWHERE = SourceInfo("", "", None, ())


class Ticket:
    """A request for the file of a task. Withdrawn by `close`, or when garbage collected."""

    __slots__ = ("_prefetcher", "task")

    def __init__(self, task: Task, prefetcher: Prefetcher) -> None:
        self.task: Task | None = task
        self._prefetcher = prefetcher

    def take(self) -> CachedContent:
        """Return the content of the file, waiting for it if it is being fetched."""
        task = self.task
        if task is None:
            raise RuntimeError("the ticket was closed")
        return self._prefetcher.take(task)

    def close(self) -> None:
        """Withdraw the request."""
        self.__del__()
        self._prefetcher.settle()

    def __del__(self) -> None:
        # Runs wherever garbage is collected, even where the lock is held.
        task, self.task = self.task, None
        if task is not None:
            self._prefetcher.leavers.append(task)


class Prefetcher:
    """Threads that fetch files to a cache on disk, in the order of the requests.

    A full cache stops them until something is released; until then, files are read from their
    stores as if there were no cache.

    Args:
        disk: The cache.
        form: The form in which contents are stored.
        num_threads: How many files are fetched at a time.
    """

    def __init__(self, disk: SharedContents, form: Form, num_threads: int) -> None:
        self.disk = disk
        self.form = form
        self.leavers: deque[Task] = deque()
        self.counts: Counter[str] = Counter()
        self._tasks: dict[str, Task] = {}
        self._queue: deque[Task] = deque()
        self._released: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._run, name=f"energon cache {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, store: FileStore[Any], name: str) -> Ticket:
        """Return a ticket for a file, and start fetching it unless that has begun already."""
        key = self.form.key(store, name)
        with self._changed:
            self._see_off()
            task = self._tasks.get(key)
            if task is None:
                task = self._tasks[key] = Task(store, name, key)
                self._queue.append(task)
                self._changed.notify()
            task.users += 1
        return Ticket(task, self)

    def keep(self, data: bytes) -> Ticket:
        """Return a ticket for `data`, which are written to disk as soon as there is room."""
        task = Task(None, "", _VALUE + uuid4().hex)
        task.content = data, _NOWHERE
        task.step = Step.FETCHED
        task.fetched.set()
        task.users = 1
        with self._changed:
            self._see_off()
            self._tasks[task.key] = task
            self._queue.append(task)
            self._changed.notify()
        return Ticket(task, self)

    def take(self, task: Task) -> CachedContent:
        """Return the content of a task's file: from memory, from disk, or from its store."""
        if self._pid != os.getpid():
            return self._fetch_again(task)
        with self._changed:
            self._see_off()
            if task.step is Step.QUEUED and task.users == 1:
                # No other reader waits for it, so it need not be written to disk.
                task.step = Step.ABSENT
                task.fetched.set()
        if task.step is Step.FETCHING:
            task.fetched.wait()
        content = task.content
        if content is None:
            content = self._look(task.key)
        self.counts["misses" if content is None else "hits"] += 1
        return self._fetch_again(task) if content is None else content

    def look(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the content of a file: from disk if it is there, else from its store."""
        key = self.form.key(store, name)
        content = self._look(key)
        self.counts["misses" if content is None else "hits"] += 1
        if content is None:
            content = self.form.fetch(store, name)
            self.disk.store(key, content, pin=False)
        return content

    def settle(self) -> None:
        """Process tickets that were closed."""
        if self._pid == os.getpid():
            with self._changed:
                self._see_off()

    def close(self) -> None:
        """End the threads and stop using the cache; from then on, tickets read from the stores."""
        if self._closed or self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            for task in self._tasks.values():
                task.step = Step.ABSENT
                if task.store is not None:
                    task.content = None
                task.fetched.set()
            self._changed.notify_all()
        deadline = time.monotonic() + PREFETCH_CLOSE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # which collects a forgotten pool
                thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            # Otherwise a store does not answer, and the next user deletes the folder.
            self.disk.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._released or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                task = self._queue.popleft() if self._queue else None
                if task is not None and task.step is Step.QUEUED:
                    task.step = Step.FETCHING
            if task is not None:
                self._fetch(task)
                self._write(task)
            self._let_go()

    def _fetch(self, task: Task) -> None:
        """Read the file of a task into memory, unless it is on disk."""
        if task.step is not Step.FETCHING or task.store is None:
            return
        try:
            if self.disk.pin(task.key):
                self._move(task, Step.KEPT)
                return
            content = self.form.fetch(task.store, task.name)
        except Exception:
            # The reader will try the store itself and fail there, where the sample is known.
            self._move(task, Step.ABSENT)
            return
        self._move(task, Step.FETCHED, content)

    def _write(self, task: Task) -> None:
        """Write a file to disk, unless all requests for it are withdrawn first."""
        content = task.content
        if task.step is not Step.FETCHED or content is None or not task.users:
            return
        shared = task.store is not None
        while (stored := self.disk.store(task.key, content, shared=shared)) == "full":
            with self._changed:
                self._see_off()
                if self._closed or not task.users:
                    break
                if not self._released:
                    self._changed.wait(ROOM_SECONDS)
            self._let_go()
        if stored == "stored":
            self._move(task, Step.KEPT)
        elif shared:
            self._move(task, Step.ABSENT)

    def _fetch_again(self, task: Task) -> CachedContent:
        if task.store is None:
            path = self.disk.pinned_path(task.key) or task.key
            raise NoSuchFileError(
                f"{path}: a value stored in this cache is gone; the pool was closed, or its files "
                "were deleted"
            )
        return self.form.fetch(task.store, task.name)

    def _look(self, key: str) -> CachedContent | None:
        return None if self._closed else self.disk.read(key)

    def _move(self, task: Task, step: Step, content: CachedContent | None = None) -> None:
        with self._changed:
            if self._closed:
                return
            task.step = step
            task.content = content
            task.fetched.set()
            if not task.users and step is Step.KEPT:
                self._released.append(task.key)

    def _see_off(self) -> None:
        """Process tickets that were closed. The lock is held."""
        while self.leavers:
            task = self.leavers.popleft()
            task.users -= 1
            if task.users:
                continue
            if self._tasks.get(task.key) is task:
                del self._tasks[task.key]
            if task.step is Step.KEPT:
                self._released.append(task.key)
                self._changed.notify()
            elif task.step is Step.QUEUED:
                task.step = Step.ABSENT

    def _let_go(self) -> None:
        """Release contents that are no longer requested."""
        with self._changed:
            self._see_off()
            keys = [key for key in self._released if key not in self._tasks]
            self._released.clear()
        self.disk.release(keys)


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
        self._lock = fork_safe_lock()
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
        settings: dict[str, Any] = {
            "parent_cache_dir": self.parent_cache_dir,
            "num_workers": self.num_workers,
            "max_cache_size_gbytes": self.limits.max_bytes / (1 << 30),
            "max_cache_count": self.limits.max_count,
            "method": self.method,
            "name": self.name,
        }
        return partial(type(self), **settings), ()

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
