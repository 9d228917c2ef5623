"""Cache remote shards on local disk as they are streamed.

A shard is written to the cache while it is first read, and gets its final name once it has been
read to its end and is complete. Paths below the cache folder mirror addresses, so no two addresses
share a file. Files stored by the cache are verified against their checksum and, where the server
reports them, the size and version of the object.

A file that a user has placed in the folder overrides a shard: `DIR/shard.tar` overrides
`s3://bucket/train/shard.tar`, and `DIR/train/shard.tar` does so where several shards have the same
name. Files stored by the cache have a record beside them, which distinguishes them from overrides.
A file that would override two shards of a list is an error.

A full disk only slows down loading: shards are then read without the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from energon.errors import ConfigError, EnergonError
from energon.formats.tar.stream import ByteStream
from energon.formats.text import parse_json
from energon.io.address import redact, scheme_of
from energon.io.atomic import publish, write_atomic
from energon.io.disk_cache import CachePolicy, DiskCache, is_intact, touch
from energon.limits import read_local_document
from energon.webdataset.gopen import tell

logger = logging.getLogger("energon")


def nothing() -> None:
    """Do nothing."""


@dataclass
class ShardStream:
    """An open shard.

    Args:
        url: Its address, as it is listed.
        stream: Its bytes after `head`, unpacked.
        head: The first bytes, if they were already read.
        local_path: Where it is on disk, or will be once it has been read; None if unknown.
        completed: Called once it has been read to its end and is complete.
    """

    url: str
    stream: ByteStream
    head: bytes = b""
    local_path: str | None = None
    completed: Callable[[], None] = nothing


_UNSAFE = re.compile(r"[^\w.,=+@-]")
_RECORD = ".about.json"


def record_path(path: Path) -> Path:
    """Return the path of the record that the cache stores beside a file of its own."""
    return path.with_name(f".{path.name}{_RECORD}")


def _has_content(path: Path) -> bool:
    """Return whether a file exists and is not empty; shards never are."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _is_override(path: Path) -> bool:
    """Return whether a file in the cache was placed there by a user."""
    is_ours = path.name.startswith(".") or record_path(path).exists()
    return not is_ours and _has_content(path)


def _kept_shards(folder: Path) -> Iterator[Path]:
    """Yield the files that the cache has stored, not those placed by users."""
    for path in folder.rglob("*"):
        if not path.name.startswith(".") and record_path(path).exists() and path.is_file():
            yield path


_SHARDS = CachePolicy(
    entries=_kept_shards,
    beside=lambda path: (record_path(path),),
    usage=".usage",
    warning="shard cache %s takes no shards (%s), which are read from their addresses without a "
    "cache. Free some space there, set cache_size or WDS_CACHE_SIZE to less than the disk has, or "
    "name another cache_dir",
)


def cache_of(
    cache_size: float = -1,
    cache_dir: str | os.PathLike[str] | None = None,
    url_to_name: Callable[[str], str] | None = None,
) -> ShardCache | None:
    """Return the cache that options and environment specify, or None.

    Args:
        cache_size: Maximum size in bytes; 0 for no cache, -1 for WDS_CACHE_SIZE in the
            environment or else no limit.
        cache_dir: Its folder, created if necessary; None for WDS_CACHE in the environment, or
            else no cache.
        url_to_name: Returns the path of a shard below the folder.
    """
    folder = cache_dir or os.environ.get("WDS_CACHE")
    size = cache_size
    if size == -1 and "WDS_CACHE_SIZE" in os.environ:
        try:
            size = float(os.environ["WDS_CACHE_SIZE"])
        except ValueError as error:
            raise ConfigError(f"WDS_CACHE_SIZE: expected a number of bytes: {error}") from error
    if not folder or size == 0:
        return None
    return ShardCache(os.fspath(folder), None if size < 0 else int(size), url_to_name)


def path_in_cache(url: str) -> str:
    """Return the path of a shard in the cache: its host or bucket, then its path there."""
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
    """A folder of cached shards, which several processes may share.

    Args:
        folder: The folder.
        max_bytes: Maximum total size; the least recently used files are deleted first. None for
            no limit.
        url_to_name: Returns the path of a shard below the folder; None for `path_in_cache`, which
            is also used where the path is taken by another shard.
    """

    folder: str
    max_bytes: int | None = None
    url_to_name: Callable[[str], str] | None = None

    def open(self, url: str, opener: Callable[[], Any]) -> ShardStream:
        """Open a shard from the cache, or else at its address, filling the cache.

        Args:
            url: Its address.
            opener: Opens it at its address.
        """
        path = self.find(url)
        is_in = "is not" if path is None else "is"
        tell("WDS_VERBOSE_CACHE", "%s %s in the cache", redact(url), is_in)
        if path is not None:
            with contextlib.suppress(OSError):
                return ShardStream(url, open(path, "rb", buffering=0), local_path=str(path))
        stream = opener()
        try:
            path = self._path(url)
            caching = CachingStream(stream, path)
        except OSError as error:
            _SHARDS.warn(self.folder, error)
            return ShardStream(url, stream)

        keep = partial(self._keep, url, caching)
        return ShardStream(url, caching, local_path=str(path), completed=keep)

    def find(self, url: str) -> Path | None:
        """Return the file to read for a shard: an intact, current copy, or else its override."""
        path = self._path(url)
        if _has_content(path) and self._is_current(url, path):
            touch(path)
            return path
        return self._override(url)

    def check_overrides(self, urls: Iterable[str]) -> None:
        """Check that no file overrides two of these shards.

        Raises:
            ConfigError: If one does.
        """
        names = {name for _, _, files in os.walk(self.folder) for name in files}
        users: dict[Path, str] = {}
        for url in urls if names else ():
            address = _address(url)
            if address.rpartition("/")[2] not in names or _has_content(self._path(url)):
                continue
            path = self._override(url)
            if path is not None and users.setdefault(path, address) != address:
                raise ConfigError(
                    f"{path} would override two shards: {redact(users[path])} and "
                    f"{redact(address)}. Move it into a subfolder of the cache with the name of "
                    "the folder that holds the intended shard"
                )

    def _override(self, url: str) -> Path | None:
        """Return the file that overrides a shard, the most specific of several."""
        if scheme_of(url) in ("", "pipe"):
            return None
        parts = [part for part in _address(url).split("/") if part not in ("", ".", "..")]
        paths = (Path(self.folder, *parts[start:]) for start in range(1, len(parts)))
        return next(filter(_is_override, paths), None)

    def _path(self, url: str) -> Path:
        name = path_in_cache(url)
        if self.url_to_name is not None:
            chosen = self.url_to_name(url)
            record = _read_record(Path(self.folder, chosen))
            name = chosen if record is None or record.get("url") == url else name
        path = Path(self.folder, name)
        if not path.resolve().is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"url_to_name returned {name!r} for {redact(url)}, which leads out of the cache"
            )
        return path

    def _keep(self, url: str, stream: CachingStream) -> None:
        """Keep a complete file, and record what is known about it."""
        try:
            content = stream.finish()
            if content is None:
                return
            path = self._path(url)
            # The record comes first: a file without one counts as placed by a user.
            record = {"url": url, "version": _version(url), **content}
            cache = DiskCache(self.folder, max_bytes=self.max_bytes, policy=_SHARDS)
            with cache.reserve(content["size"]):  # one larger than the limit replaces all others
                write_atomic(record_path(path), json.dumps(record))
                stream.keep()
        except OSError as error:
            _SHARDS.warn(self.folder, error)

    def _is_current(self, url: str, path: Path) -> bool:
        record = _read_record(path)
        if record is None:
            # Placed by a user, and therefore taken as it is.
            return True
        if record.get("url") != url:
            return False
        size, mtime_ns, checksum = (record.get(name) for name in ("size", "mtime_ns", "crc"))
        try:
            if not is_intact(path, size=size, mtime_ns=mtime_ns, checksum=checksum):
                return False
        except OSError:
            return False
        version = _version(url)
        return version is None or record.get("version") in (None, version)


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return the record of a file: empty if damaged, None if a user has placed the file."""
    try:
        record = parse_json(read_local_document(record_path(path)), origin="the record")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


class CachingStream:
    """A stream that is copied to a file as it is read, until the disk is full.

    Args:
        stream: The source.
        path: Final path of the file, if it is kept.

    Raises:
        OSError: If the disk does not even take an empty file.
    """

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._checksum = self._size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, self._temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        # Unbuffered, since a buffer would be written again when the file is closed.
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    @property
    def written_to(self) -> str:
        """Path of the incomplete file."""
        return self._temporary

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, and none only at the end."""
        data: bytes = self._stream.read(size) or b""
        if not self._file.closed:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                _SHARDS.warn(os.path.dirname(self._path), error)
                self._drop()
            self._checksum = zlib.crc32(data, self._checksum)
            self._size += len(data)
        return data

    def finish(self) -> dict[str, int] | None:
        """Return size and checksum after it was read completely; None if the file is gone."""
        if self._file.closed:
            return None
        os.fsync(self._file.fileno())
        mtime_ns = os.fstat(self._file.fileno()).st_mtime_ns
        return {"size": self._size, "crc": self._checksum, "mtime_ns": mtime_ns}

    def keep(self) -> None:
        """Give the file its final name."""
        self._file.close()
        publish(self._temporary, self._path)

    def close(self) -> None:
        """Close the stream, and delete the file unless it was kept."""
        self._stream.close()
        if not self._file.closed:
            self._drop()

    def _drop(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


def _address(url: str) -> str:
    """Return an address without its query, which may contain signatures."""
    return url.partition("?")[0]


def _version(url: str) -> str | None:
    """Return the version of an object; None if unknown."""
    if scheme_of(url) in ("", "pipe"):
        return None
    from energon.io.files import open_store

    try:
        store, key = open_store(url)
        return store.info(key).version
    except EnergonError:
        return None
