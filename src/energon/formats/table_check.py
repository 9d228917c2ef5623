"""Compare a part table with its shard, to tell whether samples lie where it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from energon.errors import FormatError
from energon.formats.part_table import PartTable
from energon.formats.tar import iter_members, split_name

PROBE_BYTES = 64 << 10
"""What is read for the headers of a sample at a time."""

ReadAt = Callable[[int, int], bytes]
"""`read(offset, size)` returns exactly so many bytes of the shard."""


def find_misplaced(table: PartTable, read: ReadAt, *, count: int) -> int | None:
    """Return a sample whose headers say something else than the table, or None.

    Args:
        table: Of the shard, maybe of an earlier version of it.
        read: Reads the shard.
        count: How many samples to look at, evenly spread.
    """
    last = table.num_samples - 1
    indices: list[int] = np.unique(np.linspace(0, last, count).astype(np.int64)).tolist()
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
