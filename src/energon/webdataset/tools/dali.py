"""Indexes for NVIDIA DALI: text beside a shard, a line for each sample."""

from __future__ import annotations

import os
from pathlib import Path

from energon.formats.tables.part_table_file import open_part_table
from energon.io.atomic import write_atomic

VERSION = "v1.2"


def dali_index_path(shard: str | os.PathLike[str]) -> Path:
    """Return where the index of a shard is: its name up to the first dot, and `.idx`."""
    path = Path(shard)
    return path.with_name(path.name.partition(".")[0] + ".idx")


def write_dali_index(shard: str | os.PathLike[str]) -> Path:
    """Write the index of a shard, and return where it is."""
    table = open_part_table(shard)
    lines = [f"{VERSION} {table.num_samples}"]
    for number in range(table.num_samples):
        key = table.key_of(number)
        parts = [
            f"{name} {offset} {size} {key}.{name}"
            for name, offset, size in table.sample_parts(number)
        ]
        lines.append(" ".join(parts))
    path = dali_index_path(shard)
    write_atomic(path, "\n".join(lines) + "\n")
    return path
