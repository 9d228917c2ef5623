"""Stages that open shards, through a cache or not; the cache itself is in `shard_cache`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from energon.errors import ConfigError
from energon.formats.tar.headers import BLOCK
from energon.webdataset import security
from energon.webdataset.handlers import Handler, reraise_exception
from energon.webdataset.reading.opening import Opening
from energon.webdataset.reading.shard_cache import ShardCache, cache_of, url_to_cache_name
from energon.webdataset.reading.tar_samples import TarSamples
from energon.webdataset.reexport import reexport
from energon.webdataset.tariterators import url_opener

__all__ = [
    "FileCache",
    "LRUCleanup",
    "ShardCache",
    "StreamingOpen",
    "cache_of",
    "cached_tarfile_samples",
    "cached_tarfile_to_samples",
    "cached_url_opener",
    "pipe_cleaner",
    "url_to_cache_name",
]


class FileCache:
    """Opens shards through a cache: a stage from shards to shards with an open `stream`.

    Args:
        cache_dir: Folder of the cache; None means WDS_CACHE of the environment.
        url_to_name: Gives the path of a shard below it; None takes it from the address.
        verbose: Accepted for compatibility.
        validator: Accepted for compatibility: only shards that were read to their end, and found
            to be whole, are kept.
        handler: Decides about shards that cannot be opened.
        cache_size: Bytes that it may hold; -1 for any number.
        cache_cleanup_interval: Accepted for compatibility.
        allow: "shell" lets addresses be commands.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        url_to_name: Callable[[str], str] | None = None,
        verbose: bool = False,
        validator: Any = None,
        handler: Handler = reraise_exception,
        cache_size: float = -1,
        cache_cleanup_interval: float = 30,
        allow: Collection[str] = (),
    ) -> None:
        self.cache = cache_of(cache_size, cache_dir, url_to_name)
        if self.cache is None:
            raise ConfigError(
                "FileCache needs a folder: cache_dir, or WDS_CACHE in the environment"
            )
        self.handler = handler
        self.allowed = security.resolve(allow)

    def __call__(self, src: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield shards with an open stream."""
        opening = Opening(self.allowed, self.cache)
        for item in src:
            shard = {"url": item} if isinstance(item, str) else item
            try:
                opened = opening.open_packed(shard)
            except Exception as error:
                if self.handler(error):
                    continue
                return
            local = {"local_path": opened.local_path} if opened.local_path else {}
            yield {**shard, **local, "stream": opened.stream, "completed": opened.completed}


class StreamingOpen:
    """Opens shards at their addresses: a stage from shards to shards with an open `stream`.

    Args:
        verbose: Accepted for compatibility.
        handler: Decides about shards that cannot be opened.
        allow: "shell" lets addresses be commands.
    """

    def __init__(
        self,
        verbose: bool = False,
        handler: Handler = reraise_exception,
        allow: Collection[str] = (),
    ) -> None:
        self.handler = handler
        self.allow = allow

    def __call__(self, src: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield shards with an open stream."""
        shards = ({"url": item} if isinstance(item, str) else item for item in src)
        return url_opener(shards, self.handler, allow=self.allow)


class LRUCleanup:
    """Deletes the least recently used shards of a cache until the rest is small enough.

    Args:
        cache_dir: Folder of the cache.
        cache_size: Bytes that it may hold.
        keyfn: Accepted for compatibility.
        verbose: Accepted for compatibility.
        interval: Seconds between looks at the folder; None looks each time.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str],
        cache_size: float = 1e12,
        keyfn: Any = None,
        verbose: bool = False,
        interval: float | None = 30,
    ) -> None:
        self.cache = ShardCache(os.fspath(cache_dir), int(cache_size))
        self.interval = interval
        self._last = float("-inf")

    def cleanup(self) -> None:
        """Delete what has to go, unless that was done a moment ago."""
        now = time.monotonic()
        if self.interval is None or now - self._last >= self.interval:
            self._last = now
            self.cache.shrink()


def pipe_cleaner(spec: str) -> str:
    """Return the address in a command: the first word that looks like one, or the command."""
    if spec.startswith("pipe:"):
        words = spec[len("pipe:") :].split()
        return next((word for word in words if "://" in word), spec)
    return spec


def cached_tarfile_to_samples(
    handler: Handler = reraise_exception,
    cache_size: float = -1,
    cache_dir: str | None = None,
    url_to_name: Callable[[str], str] | None = None,
    select_files: Any = None,
    rename_files: Callable[[str], str] | None = None,
    **kw: Any,
) -> Any:
    """Return a stage from addresses of tar files to samples, through a cache; see `cache_of`."""
    return TarSamples.configured(
        handler=handler,
        select_files=select_files,
        rename_files=rename_files,
        cache_size=cache_size,
        cache_dir=cache_dir,
        url_to_name=url_to_name,
        allow=kw.get("allow", ()),
    )


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
    opened = Opening().open(os.fspath(fname))
    try:
        head = opened.head
        while len(head) < BLOCK and (more := opened.stream.read(BLOCK - len(head))):
            head += more
    finally:
        opened.stream.close()
    return head[257:262] == b"ustar"


__getattr__ = reexport(__name__, {"islocal": "reading.urls:is_local", "obsolete": "utils"})
