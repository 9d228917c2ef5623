"""Choose the source of shards by what a program names as its data."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from energon.errors import ConfigError
from energon.io.address import is_remote, redact
from energon.webdataset.reading.urls import check_variables
from energon.webdataset.shardlists import ResampledShards, SimpleShardList
from energon.webdataset.stages.base import Stage


def shardspec(spec: Any) -> Stage:
    """Return the source of shards that a pattern, a list, or a YAML file describes."""
    source: Stage = shard_source(spec)
    return source


def shard_source(
    urls: Any, *, mode: str | None = None, resampled: bool = False, allow: Collection[str] = ()
) -> Any:
    """Return the source of shards that is meant.

    Args:
        urls: See `WebDataset`.
        mode: See `WebDataset`.
        resampled: Whether to draw shards at random.
        allow: "env" lets addresses in documents read variables of the environment.

    Raises:
        ConfigError: If nothing fits.
        SecurityError: If a document needs what is not allowed.
    """
    if mode not in (None, "resampled", "unlink", "keep", "resample"):
        raise ConfigError(
            f"mode={mode!r}: expected resampled, or unlink, keep or resample for a folder"
        )
    if mode in ("unlink", "keep", "resample"):
        from energon.webdataset.reading.directory_shards import DirectoryShardList

        return DirectoryShardList(urls, mode=mode)
    resampled = resampled or mode == "resampled"
    if isinstance(urls, Mapping) or _is_document(urls):
        from energon.webdataset.reading.shard_sets import MultiShardSample

        return MultiShardSample(urls, resampled=resampled, allow=allow)
    if _is_descriptor(urls):
        from energon.webdataset.wids.descriptor import load_descriptor

        origin, from_afar = redact(os.fspath(urls)), is_remote(urls)
        urls = [shard.url for shard in load_descriptor(urls).shards]
        for url in urls:
            check_variables(url, origin=origin, allow=allow, from_afar=from_afar)
    if _is_source(urls):
        return urls
    return ResampledShards(urls) if resampled else SimpleShardList(urls)


def _is_document(urls: Any) -> bool:
    return isinstance(urls, str | os.PathLike) and os.fspath(urls).endswith((".yaml", ".yml"))


def _is_descriptor(urls: Any) -> bool:
    return isinstance(urls, str | os.PathLike) and os.fspath(urls).endswith(".json")


def _is_source(urls: Any) -> bool:
    if isinstance(urls, Stage):
        return True
    # A dataset of shards, from when such datasets were written by hand.
    return hasattr(urls, "__iter__") and not isinstance(
        urls, str | os.PathLike | list | tuple | set | frozenset
    )
