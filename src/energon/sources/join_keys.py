"""The keys of the samples of a source, shard by shard, for finding those of others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon.formats.part_table import PartTable
from energon.plan.excludes import exclude_indices
from energon.sources.webdataset import WebdatasetSource

Ints = NDArray[np.int64]


class ShardKeys(NamedTuple):
    """The samples of one shard that a source has."""

    table: PartTable
    indices: Ints
    """Their numbers in the shard."""
    ordinals: Ints
    """Their numbers in the source."""


def shard_keys(source: WebdatasetSource) -> list[Callable[[], ShardKeys]]:
    """Return for each shard of a source what opens it and returns its samples."""
    return [partial(_read, source, shard) for shard in range(len(source.shards))]


def _read(source: WebdatasetSource, shard: int) -> ShardKeys:
    low, high = source.bounds[shard : shard + 2].tolist()
    raw = np.arange(low, high)
    if len(source.excluded):
        raw = raw[~np.isin(raw, source.excluded)]
    ordinals = exclude_indices(raw, source.excluded) - source.start
    chosen = (ordinals >= 0) & (ordinals < len(source))
    indices = raw[chosen] - low + int(source.firsts[shard])
    return ShardKeys(source.open_shard(shard).table, indices, ordinals[chosen])
