"""Stages that open shards through a cache, or cache items; the cache itself is in `shard_cache`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from energon.errors import DecodeError, FormatError
from energon.formats.compressed import decompressed
from energon.formats.tar.headers import BLOCK
from energon.io.address import redact
from energon.io.atomic import atomic_path
from energon.webdataset import security
from energon.webdataset.gopen import gopen as _open
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.reading.shard_cache import (
    CachingStream,
    ShardCache,
    cache_of,
    path_in_cache,
)
from energon.webdataset.reading.tar_samples import ShardOpening, TarSamples, read_exactly
from energon.webdataset.reading.urls import is_local, local_path
from energon.webdataset.running.worker_info import WorkerInfo, current_worker_info
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator
from energon.webdataset.tariterators import opened_shards, url_opener
from energon.webdataset.utils import obsolete as obsolete

logger = logging.getLogger("energon")

default_cache_dir = os.environ.get("WDS_CACHE", "./_cache")
"""Default folder of a `FileCache`."""
default_cache_size, verbose_cache = 1e18, 0
# Programs that do not read these import this module as well: `cache_of` reports invalid numbers.
with contextlib.suppress(ValueError):
    default_cache_size = float(os.environ.get("WDS_CACHE_SIZE") or "1e18")
with contextlib.suppress(ValueError):
    verbose_cache = int(os.environ.get("WDS_VERBOSE_CACHE") or "0")

_READ_BYTES = 1 << 20
_BY_NAME = frozenset({"", "file", "http", "https", "ftp", "ftps", "gs", "s3", "ais"})


def url_to_cache_name(url: str, ndir: int = 0) -> str:
    """Return the end of an address, as a name for a local copy.

    The cache uses it only if told to (`url_to_name=url_to_cache_name`), since addresses may have
    the same end.

    Args:
        url: The address.
        ndir: Number of folders to keep before the last part.

    Raises:
        AssertionError: If `url` is not text.
    """
    if not isinstance(url, str):
        raise AssertionError(f"{url!r}: expected an address")  # as webdataset does
    parts = urlsplit(url)
    if parts.scheme not in _BY_NAME:
        return quote(url, safe="_+{}*,-")[-128:]
    return "/".join(parts.path.lstrip("/").split("/")[-1 - ndir :])


def download(
    url: str, dest: str | os.PathLike[str], chunk_size: int = _READ_BYTES, verbose: bool = False
) -> None:
    """Copy an object to a file, which gets its name once it is complete."""
    if verbose:
        logger.info("downloading %s to %s", url, dest)
    with (
        atomic_path(dest) as temporary,
        open(temporary, "wb") as file,
        closing(_open(url)) as stream,
    ):
        shutil.copyfileobj(stream, file, chunk_size)


def magic_filetype(fname: str | os.PathLike[str]) -> str:
    """Return the type of a file by its first bytes: tar archive, compressed data, or data."""
    with open(fname, "rb") as file:
        head = file.read(BLOCK)
    if head.startswith(b"\x1f\x8b"):
        return f"{fname}: gzip compressed data"
    return f"{fname}: POSIX tar archive" if head[257:262] == b"ustar" else f"{fname}: data"


get_filetype = magic_filetype


class FileCache:
    """Downloads shards to a cache, and yields them with an open `stream`.

    `WebDataset(cache_dir=)` does not wait for downloads: it reads a shard while storing it.

    Args:
        cache_dir: Folder of the cache; None for WDS_CACHE in the environment, or `./_cache`.
        url_to_name: Returns the path of a shard below it. If two shards have the same path, the
            second is stored by its whole address, as `WebDataset(cache_dir=)` does.
        verbose: Whether to log downloads.
        validator: Returns whether a downloaded file is a shard. Without one, shards are kept once
            they have been read to their end and are complete.
        handler: Called for shards that cannot be opened.
        cache_size: Maximum size in bytes; -1 for no limit.
        cache_cleanup_interval: Seconds between checks of the size.
        allow: "shell" permits addresses that are commands.

    Example:
        >>> import tempfile
        >>> cache = FileCache(cache_dir=tempfile.mkdtemp())
        >>> for shard in cache([{"url": "photos/shard-0.tar"}]):
        ...     with shard["stream"] as stream:
        ...         print(stream.read(5))
        b'0.png'
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] | None = url_to_cache_name,
        verbose: bool = False,
        validator: Callable[[str], Any] | None = None,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
        allow: Collection[str] = (),
    ) -> None:
        folder = cache_dir or os.environ.get("WDS_CACHE") or default_cache_dir
        self.cache_dir = os.fspath(folder)
        self.cache = cache_of(cache_size, folder, url_to_name) or ShardCache(self.cache_dir)
        self.url_to_name = url_to_name or path_in_cache
        self.verbose = verbose
        self.validator = validator
        self.handler = handler
        self.allowed = security.resolve(allow)
        self.cleaner: LRUCleanup | None = None
        if cache_size > 0:
            self.cleaner = LRUCleanup(
                self.cache_dir, cache_size, verbose=verbose, interval=cache_cleanup_interval
            )

    def get_file(self, url: str) -> str:
        """Return the local path of a shard, downloading it first if necessary.

        Raises:
            FormatError: If the validator rejects it.
        """
        local = local_path(url)
        if local is not None:
            return local
        opened = ShardOpening(self.allowed, self.cache).open_packed({"url": url})
        try:
            if opened.local_path is not None and not isinstance(opened.stream, CachingStream):
                return opened.local_path
            if self.cleaner is not None:
                self.cleaner.cleanup()
            if self.verbose:
                logger.info("downloading %s to %s", url, self.cache_dir)
            while opened.stream.read(_READ_BYTES):
                pass
            written_to = getattr(opened.stream, "written_to", None)
            if self.validator is not None and written_to and not self.validator(written_to):
                raise FormatError(f"{redact(url)}: the validator of the cache rejects this shard")
            opened.completed()
        finally:
            opened.stream.close()
        path = self.cache.find(url)
        if path is None:
            raise FormatError(f"{redact(url)}: the cache in {self.cache_dir} could not store it")
        return str(path)

    def __call__(self, src: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield shards with an open stream."""
        return opened_shards(src, self.handler, self._opened)

    def _opened(self, shard: dict[str, Any]) -> dict[str, Any]:
        if "stream" not in shard and "local_path" not in shard:
            shard = {**shard, "local_path": self.get_file(shard["url"])}
        return {**shard, "stream": ShardOpening(self.allowed).open_packed(shard).stream}


class StreamingOpen:
    """Opens shards at their addresses: a stage from shards to shards with an open `stream`.

    Args:
        verbose: Accepted for compatibility.
        handler: Called for shards that cannot be opened.
        allow: "shell" permits addresses that are commands.

    Example:
        >>> for shard in StreamingOpen()([{"url": "photos/shard-0.tar"}]):
        ...     with shard["stream"] as stream:
        ...         print(stream.read(5))
        b'0.png'
    """

    def __init__(
        self,
        verbose: bool = False,
        handler: Handler = reraise_exception,
        allow: Collection[str] = (),
    ) -> None:
        self.verbose = verbose
        self.handler = handler
        self.allow = allow

    def __call__(self, src: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield shards with an open stream."""
        return url_opener(map(_local_shard, src), self.handler, allow=self.allow)


def _local_shard(item: Any) -> dict[str, Any]:
    shard: dict[str, Any] = {"url": item} if isinstance(item, str) else item
    path = local_path(shard["url"])
    return shard if path is None else {**shard, "local_path": path}


class LRUCleanup:
    """Deletes files of a folder, the oldest first, until the rest is within a limit.

    All attributes may be set.

    Args:
        cache_dir: The folder.
        cache_size: Maximum total size of its files in bytes.
        keyfn: Returns a sort key for the path of a file; files with smaller keys are older.
        verbose: Whether to log deletions.
        interval: Minimum seconds between two clean-ups; None for no minimum.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "shard.tar").write_bytes(bytes(1000))
        1000
        >>> LRUCleanup(str(folder), cache_size=100).cleanup()
        >>> list(folder.iterdir())
        []
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: float = 1e12,
        keyfn: Callable[[str], Any] = os.path.getctime,
        verbose: bool = False,
        interval: float | None = 30,
    ) -> None:
        self.cache_dir = cache_dir
        self.cache_size = cache_size
        self.keyfn = keyfn
        self.verbose = verbose
        self.interval = interval
        self.last_run = float("-inf")

    def set_cache_dir(self, cache_dir: str | os.PathLike[str]) -> None:
        """Use another folder."""
        self.cache_dir = cache_dir

    def cleanup(self) -> None:
        """Delete files above the limit, at most once per `interval`."""
        now = time.monotonic()
        if self.cache_dir is None or not os.path.isdir(self.cache_dir):
            return
        if self.interval is not None and now - self.last_run < self.interval:
            return
        self.last_run = now
        files = []
        for path in Path(self.cache_dir).rglob("*"):
            # Other processes delete files, too.
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    files.append((self.keyfn(str(path)), str(path), path.stat().st_size))
        total = sum(size for *_, size in files)
        for _, name, size in sorted(files):
            if total <= self.cache_size:
                return
            if self.verbose:
                logger.info("deleting %s", name)
            Path(name).unlink(missing_ok=True)
            total -= size


def pipe_cleaner(spec: str) -> str:
    """Return the address in a command: the first word that looks like one, or the command.

    Example:
        >>> pipe_cleaner("pipe:curl -s https://host/a.tar")
        'https://host/a.tar'
    """
    if spec.startswith("pipe:"):
        words = spec[len("pipe:") :].split()
        return next((word for word in words if "://" in word), spec)
    return spec


def cached_tarfile_to_samples(
    handler: Handler = reraise_exception, *, allow: Collection[str] = (), **kw: Any
) -> Any:
    """Return a stage from addresses of tar files to samples, through a cache.

    Args:
        handler: See `tarfile_to_samples`.
        allow: See `tarfile_to_samples`.
        kw: `cache_size`, `cache_dir`, `url_to_name`, see `cache_of`, and `select_files` and
            `rename_files`, see `tarfile_to_samples`; the others are accepted for compatibility.

    Example:
        >>> import tempfile
        >>> stage = cached_tarfile_to_samples(cache_dir=tempfile.mkdtemp())
        >>> len(list(stage([{"url": "photos/shard-0.tar"}])))
        10
    """
    cache = cache_of(*map(kw.get, ("cache_size", "cache_dir", "url_to_name"), (-1, None, None)))
    names = {name: kw.get(name) for name in ("select_files", "rename_files")}
    return TarSamples.configured(handler=handler, allow=allow, cache=cache, **names)


cached_tarfile_samples = cached_tarfile_to_samples


def cached_url_opener(
    data: Iterable[Any],
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: str | None = None,
    url_to_name: Callable[[str], str] | None = None,
    **kw: Any,
) -> Iterator[dict[str, Any]]:
    """Yield shards with an open `stream`, through a cache; see `cache_of`."""
    cache = FileCache(cache_dir, url_to_name=url_to_name, handler=handler, cache_size=cache_size)
    return cache(data)


def check_tar_format(fname: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as tar archives do, compressed or not."""
    opened = ShardOpening().open(os.fspath(fname))
    with closing(opened.stream):
        head = opened.head + read_exactly(opened.stream, BLOCK - len(opened.head))
    return head[257:262] == b"ustar"


class Cached(Stage):
    """Caches items in memory: after the first complete pass, the source is no longer read.

    Each worker process caches what it has read. The same objects are yielded again, so later
    stages must not modify them in place.

    Example:
        >>> stage = Cached()
        >>> list(stage(range(3))), list(stage([]))
        ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self) -> None:
        self._items: dict[tuple[int, int], list[Any]] = {}

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        worker_numbers = (context.worker.index, context.worker.count)
        return UnsavableIterator(self._kept(source, worker_numbers), "mcached")

    def run(self, source: Iterable[Any]) -> Iterator[Any]:  # type: ignore[override]
        """Run on its own on any iterable."""
        return self(source)

    def describe(self) -> dict[str, Any]:
        return {"stage": "Cached"}

    def __getstate__(self) -> dict[str, Any]:
        return {"_items": {}}

    def _kept(self, source: Iterator[Any], worker_numbers: tuple[int, int]) -> Iterator[Any]:
        if worker_numbers in self._items:
            yield from self._items[worker_numbers]
            return
        items = []
        for item in source:
            items.append(item)
            yield item
        self._items[worker_numbers] = items


class FileCached(Stage):
    """Caches items in a database file, pickled, in their order.

    Each worker has a separate file next to it, with its number in the name. Plain data (bytes,
    text, numbers, lists and dicts) can always be cached. Unpickling objects, including arrays,
    may run code in the file, so it must be allowed, and the file should be your own.

    Args:
        fname: Path of the file.
        map_size: Accepted for compatibility: the file grows as needed.
        pickler: An object with `dumps` and `loads`; None for pickle.
        chunksize: Items per transaction.
        allow: "pickle" permits objects in the file.

    Example:
        >>> import tempfile
        >>> file = f"{tempfile.mkdtemp()}/items"
        >>> list(FileCached(file)(range(3)))
        [0, 1, 2]
    """

    def __init__(
        self,
        fname: str | os.PathLike[str],
        map_size: float = 1e12,
        pickler: Any = None,
        chunksize: int = 500,
        allow: Collection[str] = (),
    ) -> None:
        self.fname = os.fspath(fname)
        self.pickler = pickler
        self.chunksize = chunksize
        self.allowed = security.resolve(allow)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        return UnsavableIterator(self._kept(source, self._path(context.worker)), "lmdb_cached")

    def run(self, source: Iterable[Any]) -> Iterator[Any]:  # type: ignore[override]
        """Run on its own on any iterable."""
        return self(source)

    def is_complete(self) -> bool:
        """Return whether all items are in the file, so that the source is no longer read."""
        return os.path.exists(self._path(current_worker_info()))

    def describe(self) -> dict[str, Any]:
        return {"stage": "FileCached"}

    def _path(self, worker: WorkerInfo) -> str:
        suffix = "" if worker.count == 1 else f".{worker.index}-of-{worker.count}"
        return self.fname + suffix

    def _kept(self, source: Iterator[Any], path: str) -> Iterator[Any]:
        if os.path.exists(path):
            yield from self._read(path)
            return
        # The file gets its name once complete; an interrupted pass leaves none.
        with atomic_path(path) as temporary:
            yield from self._write(str(temporary), source)

    def _dumps(self, item: Any, path: str) -> bytes:
        if self.pickler not in (None, pickle):
            packed: bytes = self.pickler.dumps(item)
            return packed
        file = io.BytesIO()
        _Pickler(file, self.allowed, path).dump(item)
        return file.getvalue()

    def _loads(self, packed: bytes, path: str) -> Any:
        if self.pickler not in (None, pickle):
            return self.pickler.loads(packed)
        return _Unpickler(io.BytesIO(packed), self.allowed, path).load()

    def _read(self, path: str) -> Iterator[Any]:
        with closing(_connect(path)) as database:
            for number, item in database.execute("SELECT number, item FROM items ORDER BY number"):
                try:
                    yield self._loads(decompressed(item, "zlib"), path)
                except DecodeError as error:
                    raise FormatError(
                        f"{path}: item {number} cannot be read ({error}); delete the file to "
                        "make it again"
                    ) from error

    def _write(self, path: str, source: Iterator[Any]) -> Iterator[Any]:
        with closing(_connect(path)) as database:
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("CREATE TABLE items (number INTEGER PRIMARY KEY, item)")
            database.execute("BEGIN")
            for number, item in enumerate(source):
                packed = zlib.compress(self._dumps(item, path), 1)
                database.execute("INSERT INTO items VALUES (?, ?)", (number, packed))
                if number % self.chunksize == self.chunksize - 1:
                    database.execute("COMMIT")
                    database.execute("BEGIN")
                yield item
            database.execute("COMMIT")


class _Pickler(pickle.Pickler):
    """Pickles plain data, and objects if that is allowed."""

    def __init__(self, file: io.BytesIO, allowed: Collection[str], path: str) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._allowed = allowed
        self._path = path

    def reducer_override(self, obj: Any) -> Any:
        kind = obj if isinstance(obj, type) else type(obj)
        _require(self._allowed, self._path, f"{kind.__module__}.{kind.__qualname__}")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Unpickles plain data, and objects if that is allowed."""

    def __init__(self, file: io.BytesIO, allowed: Collection[str], path: str) -> None:
        super().__init__(file)
        self._allowed = allowed
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        _require(self._allowed, self._path, f"{module}.{name}")
        return super().find_class(module, name)


def _require(allowed: Collection[str], path: str, kind: str) -> None:
    security.require("pickle", allowed, f"{path} is a cache of pickled items, which hold a {kind}")


def _connect(path: str) -> sqlite3.Connection:
    # The garbage collector may close an abandoned iterator in any thread.
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


LMDBCached = FileCached
islocal = is_local
