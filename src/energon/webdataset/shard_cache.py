"""Keep shards that are not local on disk, as they stream by.

A shard is written to the cache while it is read for the first time, and gets its name when it
was read to its end and found to be whole. Files lie below the folder of the cache as they lie on
their servers, so no two addresses share one; a file that somebody put there under the path, or
the plain name, of a shard is taken for it. What the cache itself has stored is checked against
size and version of the object, where the server tells them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon.errors import ConfigError, EnergonError
from energon.io.address import redact, scheme_of
from energon.io.atomic import write_atomic
from energon.webdataset.shard_stream import ShardStream

logger = logging.getLogger("energon")

_UNSAFE = re.compile(r"[^\w.,=+@-]")
_ABOUT = ".about.json"


def cache_of(
    cache_size: float = -1,
    cache_dir: str | os.PathLike[str] | None = None,
    url_to_name: Callable[[str], str] | None = None,
) -> ShardCache | None:
    """Return the cache that options and environment ask for, or None.

    Args:
        cache_size: Bytes that it may hold; -1 means any number, 0 no cache. WDS_CACHE_SIZE of
            the environment comes in if this is -1.
        cache_dir: Its folder, which is made if need be; None means WDS_CACHE of the environment,
            or no cache.
        url_to_name: Gives the path of a shard below it.
    """
    folder = cache_dir or os.environ.get("WDS_CACHE")
    size = cache_size
    if size == -1 and "WDS_CACHE_SIZE" in os.environ:
        try:
            size = float(os.environ["WDS_CACHE_SIZE"])
        except ValueError as error:
            raise ConfigError(f"WDS_CACHE_SIZE: wanted is a number of bytes: {error}") from error
    if not folder or size == 0:
        return None
    return ShardCache(os.fspath(folder), None if size < 0 else int(size), url_to_name)


def url_to_cache_name(url: str) -> str:
    """Return the path of a shard in the cache: that of its address, host or bucket first."""
    scheme = scheme_of(url)
    if not scheme or scheme == "pipe":
        digest = hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
        return f"{scheme or 'path'}/{digest}"
    rest, question, query = url[len(scheme) + 3 :].partition("?")
    parts = [_UNSAFE.sub("_", part) for part in rest.split("/") if part not in ("", ".", "..")]
    if question:
        parts[-1] = f"{hashlib.blake2b(query.encode(), digest_size=4).hexdigest()}-{parts[-1]}"
    return "/".join(parts)


@dataclass(frozen=True)
class ShardCache:
    """Files of shards in a folder, which processes may share.

    Args:
        folder: Where they are.
        max_bytes: What they may take; the least recently used go first. None means no limit.
        url_to_name: Gives the path of a shard below the folder; None means `url_to_cache_name`.
    """

    folder: str
    max_bytes: int | None = None
    url_to_name: Callable[[str], str] | None = None

    def open(self, url: str, opener: Callable[[], Any]) -> ShardStream:
        """Open a shard: out of the cache, or else at its address and into the cache.

        Args:
            url: Its address.
            opener: Opens it there.
        """
        path = self.find(url)
        verbose = os.environ.get("WDS_VERBOSE_CACHE", "0") not in ("", "0")
        level = logging.INFO if verbose else logging.DEBUG
        logger.log(level, "%s is %sin the cache", redact(url), "not " if path is None else "")
        if path is not None:
            return ShardStream(url, open(path, "rb", buffering=0), local_path=str(path))
        stream = CachingStream(opener(), self._path(url))

        def completed() -> None:
            stream.keep()
            self._note(url)
            self.shrink()

        return ShardStream(url, stream, completed=completed)

    def find(self, url: str) -> Path | None:
        """Return the file of a shard, if it is there and up to date."""
        path = self._path(url)
        if path.exists():
            if not self._is_current(url, path):
                return None
            with contextlib.suppress(OSError):
                os.utime(path)
            return path
        named = Path(self.folder) / url.partition("?")[0].rpartition("/")[2]
        return named if scheme_of(url) not in ("", "pipe") and named.is_file() else None

    def shrink(self) -> None:
        """Delete the least recently used files until the rest is small enough."""
        if self.max_bytes is None:
            return
        found = []
        for path in Path(self.folder).rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.name.startswith(".") and self._about(path).exists():
                    about = path.stat()
                    found.append((about.st_mtime_ns, about.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found)[:-1]:
            if total <= self.max_bytes:
                return
            # Whoever reads it keeps it open, and loses nothing.
            path.unlink(missing_ok=True)
            self._about(path).unlink(missing_ok=True)
            total -= size

    def _path(self, url: str) -> Path:
        name = (self.url_to_name or url_to_cache_name)(url)
        path = Path(self.folder, name)
        if not path.resolve().is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(f"url_to_name gave {name!r} for {url}, which leads out of the cache")
        return path

    def _about(self, path: Path) -> Path:
        return path.with_name(f".{path.name}{_ABOUT}")

    def _note(self, url: str) -> None:
        path = self._path(url)
        about = {"url": url, "size": path.stat().st_size, "version": _version(url)}
        write_atomic(self._about(path), json.dumps(about))

    def _is_current(self, url: str, path: Path) -> bool:
        try:
            about = json.loads(self._about(path).read_text())
        except (OSError, ValueError):
            # Somebody has put the file there: it is the shard, because they say so.
            return True
        if about.get("url") != url or about.get("size") != path.stat().st_size:
            return False
        version = _version(url)
        return version is None or about.get("version") in (None, version)


class CachingStream:
    """Bytes that are written to a file as they are read.

    Args:
        stream: Where they come from.
        path: Where the file will be, if it is kept.
    """

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, self._temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._file = os.fdopen(descriptor, "wb")

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; none at the end only."""
        data: bytes = self._stream.read(size) or b""
        if not self._file.closed:
            self._file.write(data)
        return data

    def keep(self) -> None:
        """Give the file its name: everything was read."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)

    def close(self) -> None:
        """Close the stream, and drop the file if it was not kept."""
        self._stream.close()
        if not self._file.closed:
            self._file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)


def _version(url: str) -> str | None:
    """Return what tells versions of an object apart, or None where nobody knows."""
    if scheme_of(url) in ("", "pipe"):
        return None
    from energon.io.registry import open_store

    try:
        store, key = open_store(url)
        return store.info(key).version
    except EnergonError:
        return None
