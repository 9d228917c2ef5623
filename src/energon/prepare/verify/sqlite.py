"""Compare `index.sqlite` with the part tables of the shards that it is of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from energon.counting import counted
from energon.errors import FormatError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import SqliteReader
from energon.formats.tables.sqlite_index import ShardState, indexed_shards
from energon.prepare.index.index import IndexedShard
from energon.prepare.verify.shard import UNKNOWN_DATE

_SAMPLES = """
SELECT CAST(sample_key AS BLOB), byte_offset, byte_size FROM samples
WHERE tar_file_id = ? ORDER BY sample_index
"""
_PARTS = """
SELECT sample_index, CAST(part_name AS BLOB), content_byte_offset, content_byte_size
FROM sample_parts WHERE tar_file_id = ? ORDER BY sample_index, content_byte_offset
"""


def sqlite_difference(
    path: Path,
    shards: Sequence[str],
    indexed: Sequence[IndexedShard],
    open_table: Callable[[str], PartTable] | None,
) -> str | None:
    """Return what is wrong with an SQL index, or None.

    Args:
        path: The index.
        shards: All shards, in the order of their numbers.
        indexed: Those that have a part table, or whose headers could be read.
        open_table: Returns the table of a shard, to compare all rows with; None compares only
            of which shards it is, and whether it is whole.

    Raises:
        FormatError: If it is no SQLite file, or damaged.
    """
    known = indexed_shards(path)
    if known is not None and not _is_of(shards, indexed, known):
        return "it is not of the shards as they are now"
    with SqliteReader(path) as reader:
        if open_table is None:
            return None
        _check_pages(reader)
        numbers = {name: number for number, name in enumerate(shards)}
        for shard in indexed:
            table = open_table(shard.name)
            difference = _shard_difference(reader, numbers[shard.name], table)
            if difference is not None:
                return f"it has {difference} of {shard.name}"
    return None


def _is_of(
    shards: Sequence[str], indexed: Sequence[IndexedShard], known: Sequence[ShardState]
) -> bool:
    """Return whether the SQL index is of all shards, in these versions."""
    by_name = {shard.name: shard for shard in known}
    if list(by_name) != list(shards):
        return False
    for shard in indexed:
        other = by_name[shard.name]
        size, date = shard.state
        if other.byte_size != size or date not in (other.mtime_ns, UNKNOWN_DATE):
            return False
    return True


def _check_pages(reader: SqliteReader) -> None:
    """Raise FormatError if the pages of a file contradict each other."""
    found = reader.first("PRAGMA integrity_check(1)")
    if found != ("ok",):
        raise FormatError(f"{reader.name}: {found[0] if found else 'cannot be checked'}")


def _shard_difference(reader: SqliteReader, number: int, table: PartTable) -> str | None:
    """Return what rows of a shard differ from its part table, or None."""
    samples = list(reader.rows(_SAMPLES, (number,)))
    if len(samples) != table.num_samples:
        return f"{counted(len(samples), 'sample')}, expected {table.num_samples},"
    begin, end = table.sample_extents(np.arange(table.num_samples))
    keys = [os.fsencode(key) for key in table.keys(np.arange(table.num_samples))]
    if samples != list(zip(keys, begin.tolist(), (end - begin).tolist(), strict=True)):
        return "other keys or places of samples"
    if "sample_parts" not in reader.tables:
        return None  # early releases of Megatron-Energon wrote none
    names = [os.fsencode(name) for name in table.part_names]
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_part))
    parts = zip(
        owners.tolist(),
        [names[name] for name in table.part_name.tolist()],
        table.part_offset.tolist(),
        table.part_size.tolist(),
        strict=True,
    )
    if list(reader.rows(_PARTS, (number,))) != list(parts):
        return "other names or places of parts"
    return None
