"""Where the part table of a shard is, and what is read if it is not there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from energon.formats.part_table import PartTable
from energon.formats.part_table_bytes import has_other_version, map_part_table
from energon.formats.tar_scan import scan_tar
from energon.once import warn_once

log = logging.getLogger("energon")


def part_table_path(shard: str | os.PathLike[str]) -> Path:
    """Return where the part table of a shard is: beside it."""
    path = Path(shard)
    return path.with_name(path.name + ".parts")


def open_part_table(
    shard: str | os.PathLike[str], *, verify: bool = True, dataset: object = None
) -> PartTable:
    """Return the table of a shard: that beside it, or one made by scanning it.

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
    """Log that part tables are of no use, once for each dataset."""
    warn_once(
        log,
        f"part tables of {dataset}",
        "%s: part tables were written by another release of energon, so headers are read each "
        "time that shards are opened; `energon index` on the dataset writes the tables anew",
        dataset,
    )
