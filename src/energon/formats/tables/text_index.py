"""Text indexes: which samples of a dataset have some letters in their texts, in an SQLite file.

    about   stamp        the index of the dataset that it was made for; NULL if files tell
            rows         how many rows files have had
    files   name         a file of the dataset
            samples      how many samples it has
            stamp        changes with its content
            first_row    the row of its first sample; others follow
    ranges  file         a file
            start, stop  samples of it whose texts are indexed
    texts                full-text index (FTS5) of the trigrams in the texts of a sample, by its row

`user_version` is 1. Texts are indexed as `index_text` returns them; neither they nor the positions
of trigrams are stored. A sample that has all trigrams of a pattern is a candidate, and its texts
decide. Rows that belong to no file are those of files that have changed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from energon.errors import ConfigError, FormatError
from energon.formats.tables.sqlite_file import (
    SqliteFile,
    SqliteReader,
    ThreadReaders,
    name_of,
    writing_file,
)

TEXT_INDEX_VERSION = 1
TEXT_INDEX = "texts.sqlite"
TRIGRAM = 3
MAX_TRIGRAMS = 64
"""Up to this many trigrams of a pattern are looked up."""
FOUND_TOGETHER = 1024
_TEXTS = (
    "CREATE VIRTUAL TABLE texts USING fts5(text, content='', columnsize=0, detail=none, "
    "tokenize='trigram case_sensitive 1')"
)
_SCHEMA = (
    "CREATE TABLE about (stamp TEXT, rows INTEGER)",
    "CREATE TABLE files (name TEXT PRIMARY KEY, samples INTEGER, stamp TEXT, first_row INTEGER)",
    "CREATE TABLE ranges (file TEXT, start INTEGER, stop INTEGER)",
    _TEXTS,
    f"PRAGMA user_version = {TEXT_INDEX_VERSION}",
)
_MATCHES = (
    "SELECT rowid FROM texts WHERE texts MATCH ? AND rowid >= ? AND rowid < ? "
    f"ORDER BY rowid LIMIT {FOUND_TOGETHER}"
)


class IndexedFile(NamedTuple):
    """A file of a dataset in a text index."""

    num_samples: int
    stamp: str
    first_row: int


def index_text(text: str) -> str:
    """Return a text as it is indexed and looked up: without case, and valid UTF-8 without zeros.

    Each letter becomes the same everywhere, so what a text contains, the result contains.
    """
    return text.casefold().replace("\0", "").encode("utf-8", "replace").decode()


def trigrams(pattern: str) -> list[str]:
    """Return the trigrams that a text has if it has a pattern; none if it is too short.

    Example:
        >>> trigrams("Cats"), trigrams("at")
        (['cat', 'ats'], [])
    """
    text = index_text(pattern)
    found = dict.fromkeys(text[at : at + TRIGRAM] for at in range(len(text) - TRIGRAM + 1))
    return list(found)[:MAX_TRIGRAMS]


@dataclass
class IndexedFiles:
    """The files of a text index, and which ranges of their samples it has, with gaps between."""

    stamp: str | None = None
    rows: int = 0
    files: dict[str, IndexedFile] = field(default_factory=dict)
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: SqliteReader) -> Self:
        """Return the files of an open index.

        Raises:
            FormatError: If it is damaged, or of another version.
        """
        (version,) = reader.first("PRAGMA user_version") or (None,)
        if (
            version != TEXT_INDEX_VERSION
            or {"about", "files", "ranges", "texts"} - reader.tables.keys()
        ):
            raise FormatError(
                f"{reader.name}: expected a text index of version {TEXT_INDEX_VERSION}"
            )
        stamp, rows = reader.first("SELECT stamp, rows FROM about") or (None, 0)
        (given,) = reader.numbers(rows)
        about = cls(None if stamp is None else reader.text(stamp), given)
        for name, samples, own, row in reader.rows("SELECT * FROM files"):
            count, first = reader.numbers(samples, row)
            about.files[reader.text(name)] = IndexedFile(count, reader.text(own), first)
        for name, *edges in reader.rows("SELECT * FROM ranges ORDER BY file, start"):
            start, stop = reader.numbers(*edges)
            about.ranges.setdefault(reader.text(name), []).append((start, stop))
        about.ranges = {name: _joined(each) for name, each in about.ranges.items()}
        return about

    def is_indexed(self, file: str, start: int, stop: int) -> bool:
        """Return whether the index has the texts of consecutive samples of a file."""
        return any(low <= start and stop <= high for low, high in self.ranges.get(file, []))

    @property
    def is_sparse(self) -> bool:
        """Whether most rows are those of files that have changed."""
        return self.rows > 2 * sum(file.num_samples for file in self.files.values())


class TextIndex:
    """A text index, open for reading by any thread.

    Args:
        file: The file.

    Raises:
        ConfigError: If SQLite cannot read it.
        FormatError: If it is damaged.
    """

    def __init__(self, file: SqliteFile) -> None:
        self.name = name_of(file)
        check_sqlite()
        self._readers = ThreadReaders(file, (_TEXTS,))
        self.about = IndexedFiles.of(self._readers.get())

    def candidates(self, patterns: Sequence[str], start: int, stop: int) -> Iterator[int]:
        """Yield the rows from `start` to `stop` whose texts may have all patterns, ascending.

        Raises:
            FormatError: If the index is damaged.
        """
        found = dict.fromkeys(each for pattern in patterns for each in trigrams(pattern))
        match = " ".join('"' + each.replace('"', '""') + '"' for each in found)
        while start < stop:
            # Each piece is a query of its own, since the next one may be taken by another thread.
            reader = self._readers.get()
            rows = [row for (row,) in reader.rows(_MATCHES, (match, start, stop))]
            yield from reader.numbers(*rows)
            start = rows[-1] + 1 if len(rows) == FOUND_TOGETHER else stop


class TextIndexWriter:
    """Writes a text index, which a killed process leaves as it was after the last `add`.

    Args:
        path: The file; created if missing.
        about: Its files.
    """

    def __init__(self, path: Path, about: IndexedFiles) -> None:
        self.path, self.about = path, about
        check_sqlite()
        with writing_file(path):
            self._connection = sqlite3.connect(path, isolation_level=None)
            if not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                self._transact((statement, ()) for statement in _SCHEMA)

    def number(self, files: Mapping[str, tuple[int, str]]) -> None:
        """Give rows to the samples of files that are new or have changed.

        Args:
            files: By name, how many samples a file has, and its stamp.
        """
        about = self.about
        statements: list[tuple[str, tuple[object, ...]]] = []
        for name, file in files.items():
            known = about.files.get(name)
            if known is None or known[:2] != file:
                about.files[name] = IndexedFile(*file, about.rows)
                about.rows += file[0]
                about.ranges.pop(name, None)
                row = (name, *about.files[name])
                statements.append(("DELETE FROM ranges WHERE file = ?", (name,)))
                statements.append(("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", row))
        with writing_file(self.path):
            self._transact([*statements, *self._about_statements()])

    def add(self, name: str, start: int, texts: Sequence[str]) -> None:
        """Add the texts of consecutive samples, as `index_text` returns them.

        Args:
            name: Their file, which has rows.
            start: The number of the first sample.
            texts: The texts of each.
        """
        ranges = self.about.ranges.get(name, [])
        is_there = np.zeros(len(texts), bool)
        for low, high in ranges:
            is_there[max(0, low - start) : max(0, high - start)] = True
        first = self.about.files[name].first_row + start
        rows = [(first + at, texts[at]) for at in np.flatnonzero(~is_there).tolist()]
        added = start, start + len(texts)
        with writing_file(self.path):
            self._transact(
                [
                    *(("INSERT INTO texts(rowid, text) VALUES (?, ?)", row) for row in rows),
                    ("INSERT INTO ranges VALUES (?, ?, ?)", (name, *added)),
                ]
            )
        self.about.ranges[name] = _joined([*ranges, added])

    def finish(self, stamp: str | None, files: Mapping[str, tuple[int, str]]) -> None:
        """Make the file as small as it can be, for a dataset that has these files, and close it."""
        about = self.about
        about.stamp = stamp
        about.files = {name: each for name, each in about.files.items() if name in files}
        about.ranges = {name: about.ranges.get(name, []) for name in about.files}
        rows = [(name, *each) for name, ranges in about.ranges.items() for each in ranges]
        kept = [(name, *each) for name, each in about.files.items()]
        with writing_file(self.path):
            self._transact(
                [
                    *self._about_statements(),
                    *((f"DELETE FROM {table}", ()) for table in ("files", "ranges")),
                    *(("INSERT INTO files VALUES (?, ?, ?, ?)", each) for each in kept),
                    *(("INSERT INTO ranges VALUES (?, ?, ?)", each) for each in rows),
                    ("INSERT INTO texts(texts) VALUES ('optimize')", ()),
                ]
            )
            self._connection.execute("VACUUM")
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _about_statements(self) -> list[tuple[str, tuple[object, ...]]]:
        values = self.about.stamp, self.about.rows
        return [("DELETE FROM about", ()), ("INSERT INTO about VALUES (?, ?)", values)]

    def _transact(self, statements: Iterable[tuple[str, tuple[object, ...]]]) -> None:
        self._connection.execute("BEGIN")
        try:
            for statement, values in statements:
                self._connection.execute(statement, values)
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def read_files(file: SqliteFile) -> IndexedFiles:
    """Return the files of a text index.

    Raises:
        ConfigError: If SQLite cannot read it.
        FormatError: If it is damaged.
    """
    check_sqlite()
    with SqliteReader(file, (_TEXTS,)) as reader:
        return IndexedFiles.of(reader)


def recover(path: Path) -> IndexedFiles:
    """Return the files of an index that a killed process was writing.

    Raises:
        FormatError: If it is damaged.
    """
    try:
        with closing(sqlite3.connect(path)) as connection:  # this undoes what was not complete
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.DatabaseError as error:
        raise FormatError(f"{path}: {error}") from error
    return read_files(path)


def discard(path: Path) -> None:
    """Delete an index that is not complete, if there is one."""
    for name in (path.name, f"{path.name}-journal"):
        path.with_name(name).unlink(missing_ok=True)


def check_sqlite() -> None:
    """Raise ConfigError if SQLite has no index of trigrams."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(_TEXTS)
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"text indexes need FTS5 and its trigrams, which SQLite has from version 3.34 on; this "
            f"Python has SQLite {sqlite3.sqlite_version} ({error}); use another build of Python"
        ) from error


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges without gaps between them as one."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined
