"""Key indexes of large datasets on local disk: made once, and mapped by all processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path

from energon.errors import ConfigError
from energon.formats.meta.info import META
from energon.formats.tables.part_table_file import part_table_path
from energon.io.disk_cache import disk_cache
from energon.io.epath import AnyPath
from energon.sources.files.key_index import KeyIndex

log = logging.getLogger("energon")
SHARED_SAMPLES = 1 << 19
"""From how many samples on: below, an index is made faster than others could be waited for."""


def shared_index(
    dataset: AnyPath,
    counts: Mapping[str, int],
    make: Callable[[], KeyIndex],
    *,
    shared_samples: int = SHARED_SAMPLES,
) -> KeyIndex:
    """Return the key index of a dataset.

    Args:
        dataset: Where it is.
        counts: Its shards, and how many samples each has.
        make: Makes the index in memory; called if it is not on disk, or cannot be there.
        shared_samples: From how many samples on it is kept on disk.
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
        log.warning("the keys of %s take memory in each process: %s", dataset, error)
        return make()


def _version(dataset: AnyPath, counts: Mapping[str, int]) -> str | None:
    """Return what differs whenever the dataset was prepared anew; None if nothing tells."""
    uuid = dataset / META / "index.uuid"
    if not uuid.is_file():
        return None
    about = [uuid.read_text()]
    for shard, count in counts.items():
        about.append(f"{shard} {count}")
        if isinstance(dataset, Path):
            table = os.stat(part_table_path(dataset / shard))
            about.append(f"{table.st_size} {table.st_mtime_ns}")
    return blake2b("\n".join(about).encode(), digest_size=16).hexdigest()
