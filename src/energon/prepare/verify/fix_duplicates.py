"""Rewrite shards that contain duplicate keys, with keys that are unique."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from energon.formats.tables.part_table import PartTable
from energon.formats.tar.scan import iter_members
from energon.io.local import FilePool
from energon.prepare.files import reporting
from energon.prepare.index.index import IndexedShard
from energon.prepare.index.name_index import open_table
from energon.prepare.verify.duplicates import shards_with_known_keys
from energon.prepare.writers.tar_writer import TarWriter

log = logging.getLogger("energon")


def fix_duplicates(dataset: Path, shards: Sequence[IndexedShard]) -> list[str]:
    """Rewrite shards so that no key appears twice, and return which.

    Shards that have keys of earlier ones get keys that begin with the path of the shard. Parts
    of a sample that do not follow each other are brought together; where a part comes twice,
    the second makes a sample of its own, with a number at its key. Each shard is replaced as a
    whole, when it is complete.

    Args:
        dataset: The folder.
        shards: Its shards, indexed, in their order.
    """
    known = set(shards_with_known_keys(shards, lambda name: open_table(dataset, name)))
    changed = []
    for shard in shards:
        if shard.name in known or shard.duplicate is not None or shard.repeated is not None:
            prefix = f"{shard.name.removesuffix('.tar')}/" if shard.name in known else ""
            _rewrite(dataset, shard.name, prefix)
            changed.append(shard.name)
    return changed


def _rewrite(dataset: Path, name: str, prefix: str) -> None:
    path = dataset / name
    table = open_table(dataset, name)
    files = FilePool()
    with reporting(path), TarWriter(path, checksum=table.part_crc32 is not None) as writer:
        for key, numbers in _samples(table):
            sample: dict[str, object] = {"__key__": prefix + key}
            for number in numbers:
                offset, size = int(table.part_offset[number]), int(table.part_size[number])
                part = table.part_names[table.part_name[number]]
                sample[part] = files.pread(str(path), offset, size)
            writer.write(sample)
        lost = _count_members(path) - table.num_parts
    log.info("%s: rewritten with other keys", path)
    if lost:
        log.warning("%s: %d members that belong to no sample are left out", path, lost)


def _samples(table: PartTable) -> Iterator[tuple[str, list[int]]]:
    """Yield keys that differ, and the numbers of the parts of each."""
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
    with open(path, "rb", buffering=0) as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        return sum(1 for _ in iter_members(read, path.stat().st_size, origin=str(path)))
