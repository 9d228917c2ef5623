"""The tables of media metadata in `index.sqlite`.

| table | columns |
|---|---|
| `media_metadata` | `entry_key` (file name), `metadata_type`, `metadata_json` |
| `media_filters` | how the metadata were made: `strategy`, `patterns`, `created_at_utc` |
| `energon_media` | which files were checked: `job`, `byte_size`, `mtime_ns` for each filter |

A job is a shard of a dataset, or a file of a folder. Megatron-Energon knows the first two.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from energon.errors import ConfigError
from energon.formats.media import (
    MediaMetadata,
    deserialize_media_metadata,
    serialize_media_metadata,
)
from energon.formats.tables.sqlite_file import (
    SqliteFile,
    SqliteReader,
    ThreadReaders,
    name_of,
)
from energon.formats.tar.names import split_name
from energon.messages import shell_word

Strategy = Literal["EXTENSION", "HEADER", "GLOB"]

_TABLES = """
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


class MediaJob(NamedTuple):
    """A shard of a dataset or a file of a folder, as it was when it was examined."""

    name: str
    byte_size: int
    mtime_ns: int


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
        found = reader.first(_GET, (name,))
        return None if found is None else deserialize_media_metadata(*map(reader.text, found))


class MediaWriter:
    """Writes media metadata into an SQLite file.

    Args:
        path: The file, which may have other tables.
        strategy: How files are chosen.
        patterns: Which ones; None if the strategy needs none.
    """

    def __init__(self, path: Path, strategy: Strategy, patterns: str | None) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.executescript(_TABLES)
        self._filter = strategy if patterns is None else f"{strategy} {patterns}"
        # NULLs are never equal in SQL, so patterns that do not exist are looked for by hand.
        known = self._connection.execute(
            "SELECT * FROM media_filters WHERE strategy = ? AND patterns IS ?",
            (strategy, patterns),
        ).fetchone()
        if known is None:
            self._connection.execute(
                "INSERT INTO media_filters (strategy, patterns) VALUES (?, ?)",
                (strategy, patterns),
            )

    def done(self) -> set[MediaJob]:
        """Return the jobs that are done."""
        rows = self._connection.execute(
            "SELECT job, byte_size, mtime_ns FROM energon_media WHERE filter = ?", (self._filter,)
        )
        return {MediaJob(*row) for row in rows}

    def write(self, jobs: Iterable[tuple[MediaJob, Iterable[tuple[str, MediaMetadata]]]]) -> None:
        """Store the results of some jobs in one transaction."""
        connection = self._connection
        connection.execute("BEGIN")
        for job, found in jobs:
            rows = [(name, *serialize_media_metadata(metadata)) for name, metadata in found]
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
        connection.executescript(_TABLES)
        connection.execute("ATTACH ? AS source", (str(source),))
        connection.execute("BEGIN")
        for table in ("media_metadata", "media_filters", "energon_media"):
            if table in reader.tables:
                connection.execute(f"INSERT INTO {table} SELECT * FROM source.{table}")
        _forget(connection, _changed_jobs(connection))
        connection.execute("COMMIT")
        connection.execute("DETACH source")
    finally:
        connection.close()


def _forget(connection: sqlite3.Connection, jobs: Iterable[str]) -> None:
    connection.create_function("sample_of", 1, _sample_of, deterministic=True)
    found = connection.execute("SELECT count(*) FROM main.sqlite_schema WHERE name = 'samples'")
    of_samples = bool(found.fetchone()[0])
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


def _changed_jobs(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT DISTINCT job FROM energon_media EXCEPT "
        "SELECT DISTINCT job FROM energon_media JOIN energon_shards ON shard = job "
        "AND energon_media.byte_size = energon_shards.byte_size "
        "AND energon_media.mtime_ns = energon_shards.mtime_ns"
    )
    return [job for (job,) in rows]


def _sample_of(name: str) -> str:
    parts = split_name(name)
    return name if parts is None else parts[0]
