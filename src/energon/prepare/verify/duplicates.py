"""Find duplicates in a dataset, sample keys or parts of a sample, and create unique keys.

Memory does not grow with the dataset. The keys of a shard are known in ascending order. Shards
whose ranges of keys do not overlap, as when samples are numbered throughout, have none in common.
For the others, one range of keys is compared at a time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from energon.errors import DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import iter_members
from energon.io.backends.local import OpenFile
from energon.local_file import open_binary
from energon.prepare.files import reporting
from energon.prepare.index import IndexedShard, open_table
from energon.prepare.writers.shard_writer import TarWriter

MAX_HELD_KEYS = 250_000
"""How many keys are compared at a time."""

OpenTable = Callable[[str], PartTable]


def check_unique(shards: Sequence[IndexedShard], open_table: OpenTable) -> None:
    """Check that no key occurs twice in a dataset, and no part twice in a sample.

    Args:
        shards: The shards of the dataset.
        open_table: Returns the part table of a shard, by its name.

    Raises:
        DuplicateSampleKeyError: If one does.
    """
    for shard in shards:
        if shard.repeated is not None:
            raise shard.repeated.error(shard.name)
        if shard.duplicate is not None:
            raise DuplicateSampleKeyError(
                f"sample key {shard.duplicate!r} occurs twice in {shard.name}, with other keys "
                "in between; the parts of a sample must be adjacent and keys unique: rewrite the "
                "shard, as `energon prepare --fix-duplicates` does"
            )
    for overlapping in _overlapping(shards):
        for key, first, second in _shared_keys(overlapping, open_table):
            one, other = sorted((first, second))
            raise DuplicateSampleKeyError(
                f"sample key {key.decode('utf-8', 'surrogateescape')!r} is in {one} and again in "
                f"{other}; keys must be unique in a dataset: rename the files, e.g. with a prefix "
                "for each shard, as `energon prepare --fix-duplicates` does"
            )


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


def shards_with_repeated_keys(
    shards: Sequence[IndexedShard], open_table: OpenTable
) -> Iterator[str]:
    """Yield the shards that have a key of an earlier one, possibly several times."""
    order = {shard.name: number for number, shard in enumerate(shards)}
    for overlapping in _overlapping(shards):
        group = sorted(overlapping, key=lambda shard: order[shard.name])
        for _, _, name in _shared_keys(group, open_table):
            yield name


def _shared_keys(
    shards: Sequence[IndexedShard], open_table: OpenTable
) -> Iterator[tuple[bytes, str, str]]:
    """Yield keys that two shards have, the first shard with it, and the other."""
    bounds = _bounds(shards, open_table)
    for low, high in zip([None, *bounds], [*bounds, None], strict=True):
        owners: dict[bytes, str] = {}
        for shard in shards:
            for key in _keys_between(open_table(shard.name), low, high):
                other = owners.setdefault(key, shard.name)
                if other != shard.name:
                    yield key, other, shard.name


def _bounds(shards: Sequence[IndexedShard], open_table: OpenTable) -> list[bytes]:
    """Return keys that divide those of all shards into ranges of about `MAX_HELD_KEYS` keys."""
    total = sum(shard.num_samples for shard in shards)
    count = total // MAX_HELD_KEYS
    if not count:
        return []
    step = max(1, MAX_HELD_KEYS // 8)
    drawn: list[bytes] = []
    for shard in shards:
        table = open_table(shard.name)
        drawn += map(table.key_at, range(step // 2, shard.num_samples, step))
        if shard.num_samples <= step // 2:
            drawn.append(shard.first_key)
    drawn.sort()
    return sorted({drawn[number * len(drawn) // (count + 1)] for number in range(1, count + 1)})


def _keys_between(table: PartTable, low: bytes | None, high: bytes | None) -> Iterator[bytes]:
    ranks = range(table.num_samples)
    start = 0 if low is None else bisect_left(ranks, low, key=table.key_at)
    stop = table.num_samples if high is None else bisect_left(ranks, high, key=table.key_at)
    return map(table.key_at, range(start, stop))


logger = logging.getLogger("energon")


def fix_duplicates(dataset: Path, shards: Sequence[IndexedShard]) -> list[str]:
    """Rewrite shards so that no key appears twice, and return which.

    Shards that have keys of earlier ones get keys prefixed with the path of the shard. Parts of a
    sample that are not adjacent are brought together; if a part occurs twice, the second one
    becomes a separate sample, with a number added to its key. Each shard is replaced as a whole,
    once it is complete.

    Args:
        dataset: The folder.
        shards: Its indexed shards, in order.
    """
    repeating = set(shards_with_repeated_keys(shards, lambda name: open_table(dataset, name)))
    changed = []
    for shard in shards:
        if shard.name in repeating or shard.duplicate is not None or shard.repeated is not None:
            prefix = f"{shard.name.removesuffix('.tar')}/" if shard.name in repeating else ""
            _rewrite(dataset, shard.name, prefix)
            changed.append(shard.name)
    return changed


def _rewrite(dataset: Path, name: str, prefix: str) -> None:
    path = dataset / name
    table = open_table(dataset, name)
    file = OpenFile(str(path))
    with reporting(path), TarWriter(path, checksum=table.part_crc32 is not None) as writer:
        for key, numbers in _samples(table):
            sample: dict[str, object] = {"__key__": prefix + key}
            for number in numbers:
                offset, size = int(table.part_offset[number]), int(table.part_size[number])
                part = table.part_names[table.part_name[number]]
                sample[part] = file.pread(offset, size)
            writer.write(sample)
        lost = _count_members(path) - table.num_parts
    logger.info("%s: rewritten with other keys", path)
    if lost:
        logger.warning("%s: %d members that belong to no sample are skipped", path, lost)


def _samples(table: PartTable) -> Iterator[tuple[str, list[int]]]:
    """Yield unique keys, and the numbers of the parts of each."""
    samples: dict[str, dict[int, int]] = {}
    names = table.part_name
    keys = table.keys(np.arange(table.num_samples))
    taken = set(keys)
    for index, key in enumerate(keys):
        candidates = (f"{key}_{copy}" for copy in count(2))
        unused = key
        for number in table.part_numbers(index):
            part = int(names[number])
            while part in samples.get(unused, ()):
                unused = next(name for name in candidates if name not in taken)
            samples.setdefault(unused, {})[part] = number
    for key, parts in samples.items():
        yield key, list(parts.values())


def _count_members(path: Path) -> int:
    with open_binary(path, buffering=0) as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        return sum(1 for _ in iter_members(read, path.stat().st_size, origin=str(path)))
