"""Count the samples of shards by what their indexes say, without reading the shards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.json_text import parse_json
from energon.io.address import join_address, parent_address, redact
from energon.io.files import file_info, read_document

_OFFSET_BYTES = 8


def count_samples(pipeline: Any) -> int:
    """Return how many samples the shards of a pipeline have.

    Raises:
        ConfigError: If its source is no list of shards, or a shard has no index.
    """
    urls = getattr(pipeline.stages[0] if pipeline.stages else None, "urls", None)
    if urls is None:
        raise ConfigError(
            "the number of samples is unknown, because the pipeline does not begin with a list of "
            "shards; give it: with_length(n)"
        )
    return sum(shard_counts(urls))


def shard_counts(urls: Sequence[str]) -> list[int]:
    """Return how many samples each shard has.

    Looks for the list of shards that `energon prepare` or `energon tar index` wrote into a
    folder, and for the `.tar.idx` beside a shard.

    Raises:
        ConfigError: If nothing says it.
    """
    folders = {parent_address(url) for url in urls}
    known: dict[str, int] = {}
    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(_folder_counts, sorted(folders)):
            known |= found
        missing = [url for url in urls if url not in known]
        known |= dict(zip(missing, pool.map(_index_count, missing), strict=True))
    return [known[url] for url in urls]


def _folder_counts(folder: str) -> dict[str, int]:
    """Return the counts of shards by address that a folder, or one above it, lists."""
    for name in (".nv-meta/.info.json", "../.nv-meta/.info.json"):
        try:
            address = join_address(folder, name)
            info = parse_json(read_document(address), origin=redact(address))
            root = parent_address(parent_address(address))
            counts = info.get("shard_counts", {}).items()
            return {join_address(root, shard): int(count) for shard, count in counts}
        except (DatasetNotFoundError, ConfigError, ValueError, TypeError, AttributeError):
            continue
    return {}


def _index_count(url: str) -> int:
    stem = url.removesuffix(".tar")
    info = file_info(f"{stem}.tar.idx") if stem != url else None
    if info is None:
        raise ConfigError(
            f"{redact(url)}: nothing says how many samples it has; write its index with "
            "`energon tar index`, or give the number: with_length(n)"
        )
    return info.size // _OFFSET_BYTES - 1
