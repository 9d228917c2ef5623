"""Find what a dataset has twice: a sample key, or a part of a sample.

Memory does not grow with the dataset.

Keys of a shard are known in ascending order. Shards whose keys do not overlap, as where they
are numbered throughout, have none in common. Of others a range of keys is compared at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from energon.errors import DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable
from energon.prepare.index.index import IndexedShard

MAX_KEYS = 250_000
"""Keys that are compared at a time."""

OpenTable = Callable[[str], PartTable]


def check_unique(shards: Sequence[IndexedShard], open_table: OpenTable) -> None:
    """Check that no key is in a dataset twice, and no part in a sample.

    Args:
        shards: The shards of the dataset.
        open_table: Returns the part table of a shard, by its name.

    Raises:
        DuplicateSampleKeyError: If one is.
    """
    for shard in shards:
        if shard.repeated is not None:
            raise shard.repeated.error(shard.name)
        if shard.duplicate is not None:
            raise DuplicateSampleKeyError(
                f"sample key {shard.duplicate!r} comes twice in {shard.name}, with other keys "
                "between; the parts of a sample must follow each other, and keys be unique: write "
                "the shard anew, or pass --fix-duplicates"
            )
    for overlapping in _overlapping(shards):
        for key, first, second in _shared_keys(overlapping, open_table):
            raise _duplicate(key, first, second)


def _overlapping(shards: Sequence[IndexedShard]) -> Iterator[list[IndexedShard]]:
    """Yield groups of shards whose ranges of keys overlap."""
    group: list[IndexedShard] = []
    highest = b""
    for shard in sorted(shards, key=lambda shard: shard.first_key):
        if group and shard.first_key > highest:
            if len(group) > 1:
                yield group
            group = []
        group.append(shard)
        highest = max(highest, shard.last_key) if len(group) > 1 else shard.last_key
    if len(group) > 1:
        yield group


def shards_with_known_keys(shards: Sequence[IndexedShard], open_table: OpenTable) -> Iterator[str]:
    """Yield the shards that have a key of another one that comes before, maybe several times."""
    order = {shard.name: place for place, shard in enumerate(shards)}
    for overlapping in _overlapping(shards):
        group = sorted(overlapping, key=lambda shard: order[shard.name])
        for _, _, name in _shared_keys(group, open_table):
            yield name


def _shared_keys(
    shards: Sequence[IndexedShard], open_table: OpenTable
) -> Iterator[tuple[bytes, str, str]]:
    """Yield keys that two shards have, the first shard that has it, and the other."""
    bounds = _bounds(shards, open_table)
    for low, high in zip([None, *bounds], [*bounds, None], strict=True):
        owners: dict[bytes, str] = {}
        for shard in shards:
            for key in _keys_between(open_table(shard.name), low, high):
                other = owners.setdefault(key, shard.name)
                if other != shard.name:
                    yield key, other, shard.name


def _bounds(shards: Sequence[IndexedShard], open_table: OpenTable) -> list[bytes]:
    """Return keys that divide those of all shards into ranges of about `MAX_KEYS` keys."""
    total = sum(shard.num_samples for shard in shards)
    count = total // MAX_KEYS
    if not count:
        return []
    step = max(1, MAX_KEYS // 8)
    drawn: list[bytes] = []
    for shard in shards:
        table = open_table(shard.name)
        drawn += map(table.key_at, range(step // 2, shard.num_samples, step))
        if shard.num_samples <= step // 2:
            drawn.append(shard.first_key)
    drawn.sort()
    return sorted({drawn[place * len(drawn) // (count + 1)] for place in range(1, count + 1)})


def _keys_between(table: PartTable, low: bytes | None, high: bytes | None) -> Iterator[bytes]:
    places = range(table.num_samples)
    start = 0 if low is None else bisect_left(places, low, key=table.key_at)
    stop = table.num_samples if high is None else bisect_left(places, high, key=table.key_at)
    return map(table.key_at, range(start, stop))


def _duplicate(key: bytes, first: str, second: str) -> DuplicateSampleKeyError:
    first, second = sorted((first, second))
    return DuplicateSampleKeyError(
        f"sample key {key.decode('utf-8', 'surrogateescape')!r} is in {first} and again in "
        f"{second}; keys must be unique in a dataset: rename the files, e.g. with a prefix for "
        "each shard, or pass --fix-duplicates"
    )
