"""Find the samples of a source by key. For tools: nothing is remembered from call to call."""

from __future__ import annotations

import numpy as np

from energon.plan.excludes import exclude_indices
from energon.sources.join import JoinedSource
from energon.sources.jsonl import JsonlSource
from energon.sources.webdataset import WebdatasetSource


def ordinals_of(source: WebdatasetSource | JsonlSource | JoinedSource, key: str) -> list[int]:
    """Return the numbers of the samples of a source that have a key."""
    if isinstance(source, JoinedSource):
        rows = np.arange(source.start, source.stop)
        numbers = source.index.ordinals(0, rows)
        matches = ordinals_of(source.members[0], key)
        return [int(place) for match in matches for place in np.flatnonzero(numbers == match)]
    if isinstance(source, JsonlSource):
        return _included(source, int(key) - source.first) if key.isdecimal() else []
    found = []
    for shard in range(len(source.shards)):
        sample = source.open_shard(shard).table.index_of(key)
        if sample is not None:
            low, high = source.bounds[shard : shard + 2].tolist()
            place = low + sample - int(source.firsts[shard])
            if low <= place < high:
                found += _included(source, place)
    return found


def _included(source: WebdatasetSource | JsonlSource, place: int) -> list[int]:
    """Return the number of what has a place in the split, as a list of one, or of none."""
    if place in source.excluded:
        return []
    ordinal = int(exclude_indices(np.array([place]), source.excluded)[0]) - source.start
    return [ordinal] if 0 <= ordinal < len(source) else []
