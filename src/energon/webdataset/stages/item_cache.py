"""Cache the items of the first complete pass, in memory or in a file."""

from __future__ import annotations

import io
import os
import pickle
import sqlite3
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from typing import Any

from energon.errors import DecodeError, FormatError
from energon.formats.compressed import decompressed
from energon.io.atomic import atomic_path
from energon.webdataset import security
from energon.webdataset.running.place import Place, current_place
from energon.webdataset.stages.base import Context, Stage, UnsavableIterator


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
        where = (context.place.index, context.place.count)
        return UnsavableIterator(self._kept(source, where), "mcached")

    def run(self, source: Iterable[Any]) -> Iterator[Any]:  # type: ignore[override]
        """Run on its own on any iterable."""
        return self(source)

    def describe(self) -> dict[str, Any]:
        return {"stage": "Cached"}

    def __getstate__(self) -> dict[str, Any]:
        return {"_items": {}}

    def _kept(self, source: Iterator[Any], where: tuple[int, int]) -> Iterator[Any]:
        if where in self._items:
            yield from self._items[where]
            return
        items = []
        for item in source:
            items.append(item)
            yield item
        self._items[where] = items


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
        return UnsavableIterator(self._kept(source, self._path(context.place)), "lmdb_cached")

    def run(self, source: Iterable[Any]) -> Iterator[Any]:  # type: ignore[override]
        """Run on its own on any iterable."""
        return self(source)

    def is_complete(self) -> bool:
        """Return whether all items are in the file, so that the source is no longer read."""
        return os.path.exists(self._path(current_place()))

    def describe(self) -> dict[str, Any]:
        return {"stage": "FileCached"}

    def _path(self, place: Place) -> str:
        suffix = "" if place.count == 1 else f".{place.index}-of-{place.count}"
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
