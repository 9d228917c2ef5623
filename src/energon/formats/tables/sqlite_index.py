"""`.nv-meta/index.sqlite`: look up samples, parts and the metadata of media by name in SQL.

Plain training needs no such index. It serves look-ups by other tools, mounts and joins. The
tables have the columns that Megatron-Energon reads; without row ids they take half the space.
One table more says of which shards the index is, so that it can be extended and checked.

The tables of media metadata are

| table | columns |
|---|---|
| `media_metadata` | `entry_key` (file name), `metadata_type`, `metadata_json` |
| `media_filters` | how the metadata were made: `strategy`, `patterns`, `created_at_utc` |
| `energon_media` | which files were checked: `job`, `byte_size`, `mtime_ns` for each filter |

A job is a shard of a dataset, or a file of a folder. Megatron-Energon knows the first two.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from energon.errors import ConfigError, DuplicateSampleKeyError, FormatError
from energon.formats.media import (
    MediaMetadata,
    deserialize_media_metadata,
    serialize_media_metadata,
)
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import (
    SqliteFile,
    SqliteReader,
    ThreadReaders,
    name_of,
)
from energon.formats.tar.headers import split_name
from energon.messages import shell_word

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
    """A shard, or a file of a folder, as it was when it was indexed or examined."""

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
    samples, parts = sample_rows(number, table, keys), part_rows(number, table, names)
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


def sample_rows(
    number: int, table: PartTable, keys: Sequence[str | bytes]
) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a shard in the table `samples`."""
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


def part_rows(
    number: int, table: PartTable, names: Sequence[str | bytes]
) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a shard in the table `sample_parts`."""
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


Strategy = Literal["EXTENSION", "HEADER", "GLOB"]

_MEDIA_TABLES = """
CREATE TABLE IF NOT EXISTS media_metadata (
    entry_key TEXT PRIMARY KEY,
    metadata_type TEXT NOT NULL,
    metadata_json TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS media_filters (
    filter_id INTEGER PRIMARY KEY AUTOINCREMENT,
    strategy TEXT NOT NULL,
    patterns TEXT,
    created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP,
    UNIQUE (strategy, patterns)
);
CREATE TABLE IF NOT EXISTS energon_media (
    job TEXT NOT NULL,
    filter TEXT NOT NULL,
    byte_size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    PRIMARY KEY (job, filter)
) WITHOUT ROWID;
"""
_GET = "SELECT metadata_type, metadata_json FROM media_metadata WHERE entry_key = ?"
_OF_SHARD = """
SELECT sample_key FROM samples WHERE tar_file_id = (
    SELECT tar_file_id FROM energon_shards WHERE shard = ?
)
"""


class MediaTable:
    """The media metadata of a dataset or folder. May be used by many threads.

    Args:
        index: Its `index.sqlite`.

    Raises:
        ConfigError: If it holds none.
        FormatError: If it is damaged.
    """

    def __init__(self, index: SqliteFile) -> None:
        with SqliteReader(index) as reader:
            if "media_metadata" not in reader.tables:
                dataset = index.parent.parent if isinstance(index, Path) else "DATASET"
                raise ConfigError(
                    f"{name_of(index)} has no media metadata; run `energon prepare-media "
                    f"{shell_word(dataset)} --media-metadata-by-extension`"
                )
        self._readers = ThreadReaders(index)

    def get(self, name: str) -> MediaMetadata | None:
        """Return the metadata of a file, or None if there are none.

        Raises:
            FormatError: If they are damaged.
        """
        reader = self._readers.get()
        row = reader.first(_GET, (name,))
        return None if row is None else deserialize_media_metadata(*map(reader.text, row))


class MediaWriter:
    """Writes media metadata into an SQLite file.

    Args:
        path: The file, which may have other tables.
        strategy: How files are chosen.
        patterns: Which ones; None if the strategy needs none.
    """

    def __init__(self, path: Path, strategy: Strategy, patterns: str | None) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(_MEDIA_TABLES)
        self._filter = strategy if patterns is None else f"{strategy} {patterns}"
        # NULLs are never equal in SQL, so patterns that do not exist are looked for by hand.
        present = self._connection.execute(
            "SELECT * FROM media_filters WHERE strategy = ? AND patterns IS ?",
            (strategy, patterns),
        ).fetchone()
        if present is None:
            self._connection.execute(
                "INSERT INTO media_filters (strategy, patterns) VALUES (?, ?)",
                (strategy, patterns),
            )

    def done(self) -> set[ShardState]:
        """Return the jobs that are done."""
        rows = self._connection.execute(
            "SELECT job, byte_size, mtime_ns FROM energon_media WHERE filter = ?", (self._filter,)
        )
        return {ShardState(*row) for row in rows}

    def write(self, jobs: Iterable[tuple[ShardState, Iterable[tuple[str, MediaMetadata]]]]) -> None:
        """Store the results of some jobs in one transaction."""
        connection = self._connection
        connection.execute("BEGIN")
        for job, files in jobs:
            rows = [(name, *serialize_media_metadata(metadata)) for name, metadata in files]
            connection.executemany("INSERT OR REPLACE INTO media_metadata VALUES (?, ?, ?)", rows)
            connection.execute(
                "INSERT OR REPLACE INTO energon_media VALUES (?, ?, ?, ?)",
                (job.name, self._filter, job.byte_size, job.mtime_ns),
            )
        connection.execute("COMMIT")

    def forget(self, jobs: Iterable[str]) -> None:
        """Delete the results of some jobs."""
        connection = self._connection
        connection.execute("BEGIN")
        _forget(connection, jobs)
        connection.execute("COMMIT")

    def count(self) -> int:
        """Return how many files have metadata."""
        return int(self._connection.execute("SELECT count(*) FROM media_metadata").fetchone()[0])

    def close(self) -> None:
        """End writing."""
        self._connection.close()


def copy_media(source: Path, target: Path) -> None:
    """Copy the media metadata of an index to a new one of the same dataset.

    Those of shards that have changed in the meantime are left out.
    """
    with SqliteReader(source) as reader:
        if "media_metadata" not in reader.tables:
            return
    connection = sqlite3.connect(target, isolation_level=None)
    try:
        connection.executescript(_MEDIA_TABLES)
        connection.execute("ATTACH ? AS source", (str(source),))
        connection.execute("BEGIN")
        for table in ("media_metadata", "media_filters", "energon_media"):
            if table in reader.tables:
                connection.execute(f"INSERT INTO {table} SELECT * FROM source.{table}")
        changed = connection.execute(
            "SELECT DISTINCT job FROM energon_media EXCEPT "
            "SELECT DISTINCT job FROM energon_media JOIN energon_shards ON shard = job "
            "AND energon_media.byte_size = energon_shards.byte_size "
            "AND energon_media.mtime_ns = energon_shards.mtime_ns"
        )
        _forget(connection, [job for (job,) in changed.fetchall()])
        connection.execute("COMMIT")
        connection.execute("DETACH source")
    finally:
        connection.close()


def _forget(connection: sqlite3.Connection, jobs: Iterable[str]) -> None:
    connection.create_function("sample_of", 1, _sample_of, deterministic=True)
    (of_samples,) = connection.execute(
        "SELECT count(*) FROM main.sqlite_schema WHERE name = 'samples'"
    ).fetchone()
    for job in jobs:
        if of_samples:
            connection.execute(
                f"DELETE FROM media_metadata WHERE sample_of(entry_key) IN ({_OF_SHARD})", (job,)
            )
        else:
            connection.execute("DELETE FROM media_metadata WHERE entry_key = ?", (job,))
        connection.execute("DELETE FROM energon_media WHERE job = ?", (job,))
    if of_samples:
        connection.execute(
            "DELETE FROM media_metadata "
            "WHERE sample_of(entry_key) NOT IN (SELECT sample_key FROM samples)"
        )


def _sample_of(name: str) -> str:
    parts = split_name(name)
    return name if parts is None else parts[0]
