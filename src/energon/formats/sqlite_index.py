"""`.nv-meta/index.sqlite`: look up samples and parts by name in SQL.

Plain training needs no such index. It serves look-ups by other tools, mounts and joins. The
tables have the columns that Megatron-Energon reads; without row ids they take half the space.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from energon.errors import DuplicateSampleKeyError
from energon.formats.part_table import PartTable

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER,
    PRIMARY KEY (tar_file_id, sample_index)
) WITHOUT ROWID;
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER,
    PRIMARY KEY (tar_file_id, sample_index, content_byte_offset)
) WITHOUT ROWID;
"""
_FIRST = "SELECT tar_file_id FROM samples WHERE sample_key = ?"


class Shard(NamedTuple):
    """A shard to be indexed."""

    name: str
    """Path below the dataset folder."""
    table: PartTable


def write_sqlite_index(path: str | os.PathLike[str], shards: Iterable[Shard]) -> None:
    """Write the index of `shards` to a new file at `path`.

    Raises:
        DuplicateSampleKeyError: If two samples have the same key.
    """
    Path(path).unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # The file is renamed into place when it is complete: until then nobody reads it.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(_TABLES)
        connection.execute("BEGIN")
        names: list[str] = []
        for number, shard in enumerate(shards):
            names.append(shard.name)
            _insert(connection, number, shard, names)
        connection.execute("COMMIT")
    finally:
        connection.close()


def _insert(connection: sqlite3.Connection, number: int, shard: Shard, names: list[str]) -> None:
    table = shard.table
    count = table.num_samples
    keys = table.keys(np.arange(count))
    starts = table.sample_offset[:-1].tolist()
    sizes = np.diff(table.sample_offset).tolist()
    samples = zip([number] * count, keys, range(count), starts, sizes, strict=True)
    try:
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples)
    except sqlite3.IntegrityError as error:
        raise _duplicate(connection, keys, shard, names) from error
    owners = np.repeat(np.arange(count), table.first_part[1:] - table.first_part[:-1])
    columns = (
        [number] * len(owners),
        owners.tolist(),
        [table.part_names[name] for name in table.part_name.tolist()],
        table.part_offset.tolist(),
        table.part_size.tolist(),
    )
    connection.executemany(
        "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", zip(*columns, strict=True)
    )


def _duplicate(
    connection: sqlite3.Connection, keys: list[str], shard: Shard, names: list[str]
) -> DuplicateSampleKeyError:
    """Return the error that says which key is there twice, and where."""
    seen: set[str] = set()
    for key in keys:
        found = connection.execute(_FIRST, (key,)).fetchone()
        if key in seen or (found is not None and names[found[0]] != shard.name):
            other = shard.name if key in seen else names[found[0]]
            return DuplicateSampleKeyError(
                f"sample key {key!r} is in {other} and again in {shard.name}; keys must be "
                "unique in a dataset: rename the files, e.g. with a prefix for each shard"
            )
        seen.add(key)
    return DuplicateSampleKeyError(f"a sample key of {shard.name} is there twice")
