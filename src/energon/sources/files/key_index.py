"""Key indexes: in memory, or on local disk, where all processes map the same one.

Sixteen bytes per sample. Keys are not stored: equal hashes are candidates, and the reader of a
shard compares the key there.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from energon.errors import ConfigError, FormatError
from energon.formats.meta.info import META
from energon.formats.tables.part_table import PartTable, key_hash, table_hashes
from energon.formats.tables.part_table_file import part_table_path
from energon.io.disk_cache import disk_cache
from energon.io.epath import AnyPath

logger = logging.getLogger("energon")

KEY_INDEX_MAGIC = b"EKEYS\x02\0\0"


class KeyIndex:
    """Which samples of which shards may have a key.

    Args:
        tables: The tables of all shards, in the order in which shards are numbered.
    """

    def __init__(self, tables: Iterable[PartTable]) -> None:
        hashes, places = [_EMPTY], [_EMPTY]
        for shard, table in enumerate(tables):
            hashes.append(table_hashes(table, np.arange(table.num_samples))[:, 0])
            places.append(np.arange(table.num_samples, dtype=np.uint64) + np.uint64(shard << 32))
        joined = np.concatenate(hashes)
        order = np.argsort(joined, kind="stable")
        # Memory views return single numbers three times as fast as arrays do.
        self._hashes: memoryview = joined[order].data
        self._places: memoryview = np.concatenate(places)[order].data

    @classmethod
    def from_buffer(cls, data: Any, *, origin: str) -> KeyIndex:
        """Return the index that `to_bytes` turned into `data`, which is not copied.

        Raises:
            FormatError: If it is not an index.
        """
        view = memoryview(data)
        count, rest = divmod(len(view) - len(KEY_INDEX_MAGIC), 16)
        if view[: len(KEY_INDEX_MAGIC)] != KEY_INDEX_MAGIC or rest:
            raise FormatError(f"{origin}: {len(view)} bytes are not an index of keys")
        numbers = view[len(KEY_INDEX_MAGIC) :].cast("B").cast("Q")
        index = cls.__new__(cls)
        index._hashes, index._places = numbers[:count], numbers[count:]
        return index

    def to_bytes(self) -> bytes:
        """Return it as bytes in the order of this machine: magic number, hashes, places."""
        return b"".join((KEY_INDEX_MAGIC, self._hashes, self._places))

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, key: bytes) -> Iterator[tuple[int, int]]:
        """Yield shard and number of each sample that may have `key`; very rarely more than one."""
        target = key_hash(key)
        hashes: Any = self._hashes
        at = bisect_left(hashes, target)
        while at < len(hashes) and hashes[at] == target:
            place = self._places[at]
            yield place >> 32, place & 0xFFFFFFFF
            at += 1

    def collisions(self) -> list[tuple[int, int]]:
        """Return shard and number of samples that have the same hash as another, one of each."""
        hashes = np.asarray(self._hashes)
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        places = np.asarray(self._places)[same]
        return list(zip((places >> 32).tolist(), (places & 0xFFFFFFFF).tolist(), strict=True))


_EMPTY = np.empty(0, np.uint64)


SHARED_SAMPLES = 1 << 19
"""From this many samples on, an index is stored: a smaller one is made faster than found."""


def shared_index(
    dataset: AnyPath,
    counts: Mapping[str, int],
    make: Callable[[], KeyIndex],
    *,
    shared_samples: int = SHARED_SAMPLES,
) -> KeyIndex:
    """Return the key index of a dataset.

    Args:
        dataset: Address of the dataset.
        counts: Its shards, and how many samples each has.
        make: Makes the index in memory; called if it is not on disk, or cannot be stored there.
        shared_samples: From this many samples on, it is kept on disk.
    """
    if sum(counts.values()) < shared_samples:
        return make()
    version = _version(dataset, counts)
    if version is None:
        return make()
    try:
        return disk_cache().load(
            f"keys of {dataset}",
            version,
            lambda: make().to_bytes(),
            partial(KeyIndex.from_buffer, origin=f"the keys of {dataset}"),
        )
    except (ConfigError, OSError) as error:
        logger.warning("the keys of %s take memory in each process: %s", dataset, error)
        return make()


def _version(dataset: AnyPath, counts: Mapping[str, int]) -> str | None:
    """Return a value that differs after the dataset was prepared again; None if there is none."""
    uuid = dataset / META / "index.uuid"
    if not uuid.is_file():
        return None
    about = [uuid.read_text()]
    for shard, count in counts.items():
        about.append(f"{shard} {count}")
        if isinstance(dataset, Path):
            table = os.stat(part_table_path(dataset / shard))
            about.append(f"{table.st_size} {table.st_mtime_ns}")
    return blake2b(os.fsencode("\n".join(about)), digest_size=16).hexdigest()
