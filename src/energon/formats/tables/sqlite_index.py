"""`.nv-meta/index.sqlite`: look up samples and parts by name in SQL.

Plain training needs no such index. It serves look-ups by other tools, mounts and joins. The
tables have the columns that Megatron-Energon reads; without row ids they take half the space.
One table more says of which shards the index is, so that it can be extended and checked.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from energon.errors import DuplicateSampleKeyError, FormatError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import SqliteReader

_TABLES = {
    "samples": """\
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER,
    PRIMARY KEY (tar_file_id, sample_index)
) WITHOUT ROWID""",
    "sample_parts": """\
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER,
    PRIMARY KEY (tar_file_id, sample_index, content_byte_offset)
) WITHOUT ROWID""",
    "energon_shards": """\
CREATE TABLE energon_shards (
    tar_file_id INTEGER PRIMARY KEY,
    shard TEXT NOT NULL,
    byte_size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL
)""",
}
# Filling the tables first and sorting the keys then takes less time and space.
_KEY_INDEX = "CREATE UNIQUE INDEX idx_samples_sample_key ON samples(sample_key)"
_SHARDS = "SELECT shard, byte_size, mtime_ns FROM energon_shards ORDER BY tar_file_id"
_COLUMNS = 5
_ROWS = 50
"""Rows of one statement: several times as fast as one row each."""


class ShardToIndex(NamedTuple):
    """A shard to be indexed."""

    name: str
    """Path below the dataset folder."""
    table: PartTable


class ShardState(NamedTuple):
    """A shard as it was when it was indexed."""

    name: str
    byte_size: int
    mtime_ns: int


def write_sqlite_index(path: str | os.PathLike[str], shards: Iterable[ShardToIndex]) -> None:
    """Write the index of `shards` to an empty or new file at `path`.

    Raises:
        DuplicateSampleKeyError: If two samples have the same key.
    """
    connection = _connect(path)
    try:
        for statement in _TABLES.values():
            connection.execute(statement)
        connection.execute("BEGIN")
        _insert_all(connection, shards, 0)
        connection.execute(_KEY_INDEX)
        connection.execute("COMMIT")
    except sqlite3.IntegrityError as error:
        raise _duplicate(connection) from error
    finally:
        connection.close()


def extend_sqlite_index(path: str | os.PathLike[str], shards: Iterable[ShardToIndex]) -> None:
    """Append `shards` to an index that `write_sqlite_index` wrote.

    Raises:
        DuplicateSampleKeyError: If two samples have the same key.
    """
    connection = _connect(path)
    try:
        connection.execute("BEGIN")
        (first,) = connection.execute("SELECT count(*) FROM energon_shards").fetchone()
        _insert_all(connection, shards, first)
        connection.execute("COMMIT")
    except sqlite3.IntegrityError as error:
        raise DuplicateSampleKeyError(
            f"{path}: a sample key occurs twice; rename the files: {error}"
        ) from error
    finally:
        connection.close()


def indexed_shards(path: str | os.PathLike[str]) -> list[ShardState] | None:
    """Return the shards of an index, in order; None if it does not list them.

    It does not if another tool has written it, or if it is damaged. If it does, its tables are
    those that `extend_sqlite_index` expects.
    """
    if not os.path.exists(path):
        return None
    try:
        with SqliteReader(Path(path)) as reader:
            if {name: reader.tables.get(name) for name in _TABLES} != _TABLES:
                return None
            return [ShardState(*row) for row in reader.rows(_SHARDS)]
    except FormatError:
        return None


def _connect(path: str | os.PathLike[str]) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    # The file is renamed into place when it is complete: until then it is not read.
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _insert_all(connection: sqlite3.Connection, shards: Iterable[ShardToIndex], first: int) -> None:
    for number, shard in enumerate(shards, start=first):
        name, table = shard
        connection.execute(
            "INSERT INTO energon_shards VALUES (?, ?, ?, ?)",
            (number, name, table.shard_size, table.shard_mtime_ns),
        )
        _insert_shard(connection, number, table)


def _insert_shard(connection: sqlite3.Connection, number: int, table: PartTable) -> None:
    keys: Sequence[str | bytes] = table.keys(np.arange(table.num_samples))
    names: Sequence[str | bytes] = table.part_names
    sample_row, part_row = "(?, ?, ?, ?, ?)", "(?, ?, ?, ?, ?)"
    if not (_is_unicode(keys) and _is_unicode(names)):
        # Names of files may be any bytes, and SQLite keeps what it is told to be text.
        keys = [os.fsencode(key) for key in keys]
        names = [os.fsencode(name) for name in names]
        sample_row, part_row = "(?, CAST(? AS TEXT), ?, ?, ?)", "(?, ?, CAST(? AS TEXT), ?, ?)"
    samples, parts = _sample_rows(number, table, keys), _part_rows(number, table, names)
    _insert(connection, "samples", sample_row, samples, table.num_samples)
    _insert(connection, "sample_parts", part_row, parts, table.num_parts)


def _is_unicode(texts: Sequence[str | bytes]) -> bool:
    try:
        "".join(map(str, texts)).encode()
    except UnicodeEncodeError:
        return False
    return True


def _insert(
    connection: sqlite3.Connection,
    table: str,
    row: str,
    rows: Iterator[tuple[object, ...]],
    count: int,
) -> None:
    values = chain.from_iterable(rows)
    for size, repetitions in ((_ROWS, count // _ROWS), (1, count % _ROWS)):
        statement = f"INSERT INTO {table} VALUES {', '.join([row] * size)}"
        columns = [values] * (size * _COLUMNS)
        connection.executemany(statement, islice(zip(*columns, strict=False), repetitions))


def _sample_rows(
    number: int, table: PartTable, keys: Sequence[str | bytes]
) -> Iterator[tuple[object, ...]]:
    count = table.num_samples
    offsets = table.sample_offset
    return zip(
        repeat(number, count),
        keys,
        range(count),
        offsets[:-1].tolist(),
        np.diff(offsets).tolist(),
        strict=True,
    )


def _part_rows(
    number: int, table: PartTable, names: Sequence[str | bytes]
) -> Iterator[tuple[object, ...]]:
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_part))
    return zip(
        repeat(number, table.num_parts),
        owners.tolist(),
        [names[name] for name in table.part_name.tolist()],
        table.part_offset.tolist(),
        table.part_size.tolist(),
        strict=True,
    )


def _duplicate(connection: sqlite3.Connection) -> DuplicateSampleKeyError:
    """Return the error for a duplicate key, which names both places."""
    key, first, last = connection.execute(
        "SELECT sample_key, min(shard), max(shard) FROM samples JOIN energon_shards "
        "USING (tar_file_id) GROUP BY sample_key HAVING count(*) > 1 LIMIT 1"
    ).fetchone()
    return DuplicateSampleKeyError(
        f"sample key {key!r} is in {first} and again in {last}; keys must be unique in a dataset: "
        "rename the files, e.g. with a prefix for each shard"
    )
