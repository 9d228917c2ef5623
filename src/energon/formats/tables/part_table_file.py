"""Find the part table of a shard, or scan the shard if it is missing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_bytes import has_other_version, map_part_table
from energon.formats.tar.names import split_name
from energon.formats.tar.scan import iter_members, scan_tar
from energon.messages import warn_once

logger = logging.getLogger("energon")

PROBE_BYTES = 64 << 10
"""What is read for the headers of a sample at a time."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns exactly this many bytes of the shard."""


def find_misplaced(table: PartTable, read: ReadAt, *, count: int) -> int | None:
    """Return a sample whose tar headers contradict the table, or None.

    Args:
        table: Of the shard, maybe of an earlier version of it.
        read: Reads the shard.
        count: How many samples to look at, evenly spread.
    """
    last = table.num_samples - 1
    indices: list[int] = sorted(set(np.linspace(0, last, count).astype(np.int64).tolist()))
    for index in indices:
        if not _is_where_indexed(table, read, index):
            return index
    return None


def _is_where_indexed(table: PartTable, read: ReadAt, index: int) -> bool:
    begin, end = table.sample_extent(index)
    key = table.key_of(index)
    expected = [
        ((key, name), offset - begin, size) for name, offset, size in table.sample_parts(index)
    ]

    def read_sample(offset: int, size: int) -> bytes:
        return read(begin + offset, min(size, PROBE_BYTES, end - begin - offset))

    try:
        members = list(iter_members(read_sample, end - begin, origin="sample", strict=False))
    except FormatError:
        return False
    found = [
        (split_name(member.name), member.offset, member.size)
        for member in members
        if split_name(member.name) is not None
    ]
    return found == expected


def part_table_path(shard: str | os.PathLike[str]) -> Path:
    """Return the path of the part table of a shard, next to it."""
    path = Path(shard)
    return path.with_name(path.name + ".parts")


def open_part_table(
    shard: str | os.PathLike[str], *, verify: bool = True, dataset: object = None
) -> PartTable:
    """Return the table of a shard: the file next to it, or the result of scanning it.

    Datasets that were prepared by other tools have no part tables, and those that were prepared
    by another release may have some of another version; each shard is then scanned when it is
    opened.

    Args:
        shard: Path of the shard.
        verify: Whether to check the CRC of its table, which reads all of it (about a millisecond
            for 50,000 samples).
        dataset: What the shard belongs to, for warnings; None for its folder.

    Raises:
        FormatError: If the shard or its table is damaged.
    """
    path = part_table_path(shard)
    try:
        data = map_part_table(path)
    except FileNotFoundError:
        return PartTable.from_scan(scan_tar(shard, strict=False))
    if has_other_version(data):
        warn_of_other_version(path.parent if dataset is None else dataset)
        return PartTable.from_scan(scan_tar(shard, strict=False))
    return PartTable.from_buffer(data, origin=str(path), verify=verify)


def warn_of_other_version(dataset: object) -> None:
    """Log once per dataset that its part tables cannot be used."""
    warn_once(
        logger,
        f"part tables of {dataset}",
        "%s: part tables were written by another release of energon, so headers are read each "
        "time that shards are opened; `energon index` on the dataset rewrites the tables",
        dataset,
    )
