"""Text indexes: write that of a dataset, and find the samples that may have some letters.

`energon measure --text` writes the index beside that of the dataset, for searches in
`energon view`. The index that is being written is its own journal: what it has when a run is
killed, the next one keeps. Of files that have not changed since the last time, nothing is read
again. The file is an SQLite database:

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

import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, EnergonError, FormatError
from energon.formats.tables.sqlite_file import (
    SqliteFile,
    SqliteReader,
    ThreadReaders,
    writing_file,
)
from energon.inspect.measure import (
    READ_TOGETHER,
    MeasuredDataset,
    MeasureReport,
    Progress,
    SampleRange,
    measure_failed,
    run_measure,
)
from energon.inspect.where import texts_of
from energon.io.address import is_remote, redact
from energon.io.atomic import atomic_path
from energon.io.epath import AnyPath, any_path
from energon.messages import shell_word
from energon.prepare.engines import Engine
from energon.prepare.files import reporting
from energon.sources.files.locate import local_copy
from energon.sources.kinds import kind_named
from energon.sources.measures import NumbersFiles, beside_index
from energon.sources.source import Source, SplitSource

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
    distinct = dict.fromkeys(text[at : at + TRIGRAM] for at in range(len(text) - TRIGRAM + 1))
    return list(distinct)[:MAX_TRIGRAMS]


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
        (num_rows,) = reader.numbers(rows)
        files = cls(None if stamp is None else reader.text(stamp), num_rows)
        for name, samples, own, row in reader.rows("SELECT * FROM files"):
            count, first = reader.numbers(samples, row)
            files.files[reader.text(name)] = IndexedFile(count, reader.text(own), first)
        for name, *edges in reader.rows("SELECT * FROM ranges ORDER BY file, start"):
            start, stop = reader.numbers(*edges)
            files.ranges.setdefault(reader.text(name), []).append((start, stop))
        files.ranges = {name: _joined(ranges) for name, ranges in files.ranges.items()}
        return files

    def has(self, name: str, file: tuple[int, str]) -> bool:
        """Return whether a file has rows, and this number of samples and stamp as before."""
        indexed = self.files.get(name)
        return indexed is not None and indexed[:2] == file

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
        check_sqlite()
        self._readers = ThreadReaders(file, (_TEXTS,))
        self.files = IndexedFiles.of(self._readers.get())

    def candidates(self, patterns: Sequence[str], start: int, stop: int) -> Iterator[int]:
        """Yield the rows from `start` to `stop` whose texts may have all patterns, ascending.

        Raises:
            FormatError: If the index is damaged.
        """
        wanted = dict.fromkeys(letters for pattern in patterns for letters in trigrams(pattern))
        match = " ".join('"' + letters.replace('"', '""') + '"' for letters in wanted)
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
        indexed: Its files.
    """

    def __init__(self, path: Path, indexed: IndexedFiles) -> None:
        self.path, self.indexed = path, indexed
        with writing_file(path):
            self._connection = sqlite3.connect(path, isolation_level=None)
            if not self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                self._transact((statement, ()) for statement in _SCHEMA)

    def number(self, files: Mapping[str, tuple[int, str]]) -> None:
        """Give rows to the samples of files that are new or have changed.

        Args:
            files: By name, how many samples a file has, and its stamp.
        """
        indexed = self.indexed
        statements: list[tuple[str, tuple[object, ...]]] = []
        for name, file in files.items():
            if not indexed.has(name, file):
                indexed.files[name] = IndexedFile(*file, indexed.rows)
                indexed.rows += file[0]
                indexed.ranges.pop(name, None)
                row = (name, *indexed.files[name])
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
        ranges = self.indexed.ranges.get(name, [])
        is_there = np.zeros(len(texts), bool)
        for low, high in ranges:
            is_there[max(0, low - start) : max(0, high - start)] = True
        first = self.indexed.files[name].first_row + start
        rows = [(first + at, texts[at]) for at in np.flatnonzero(~is_there).tolist()]
        added = start, start + len(texts)
        with writing_file(self.path):
            self._transact(
                [
                    *(("INSERT INTO texts(rowid, text) VALUES (?, ?)", row) for row in rows),
                    ("INSERT INTO ranges VALUES (?, ?, ?)", (name, *added)),
                ]
            )
        self.indexed.ranges[name] = _joined([*ranges, added])

    def finish(self, stamp: str | None, files: Mapping[str, tuple[int, str]]) -> None:
        """Make the file as small as it can be, for a dataset that has these files, and close it."""
        indexed = self.indexed
        indexed.stamp = stamp
        indexed.files = {name: file for name, file in indexed.files.items() if name in files}
        indexed.ranges = {name: indexed.ranges.get(name, []) for name in indexed.files}
        rows = [(name, *edges) for name, ranges in indexed.ranges.items() for edges in ranges]
        kept = [(name, *file) for name, file in indexed.files.items()]
        with writing_file(self.path):
            self._transact(
                [
                    *self._about_statements(),
                    *((f"DELETE FROM {table}", ()) for table in ("files", "ranges")),
                    *(("INSERT INTO files VALUES (?, ?, ?, ?)", file) for file in kept),
                    *(("INSERT INTO ranges VALUES (?, ?, ?)", row) for row in rows),
                    ("INSERT INTO texts(texts) VALUES ('optimize')", ()),
                ]
            )
            self._connection.execute("VACUUM")
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _about_statements(self) -> list[tuple[str, tuple[object, ...]]]:
        values = self.indexed.stamp, self.indexed.rows
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
        FormatError: If it is damaged.
    """
    with SqliteReader(file, (_TEXTS,)) as reader:
        return IndexedFiles.of(reader)


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


class _Run(NamedTuple):
    """Consecutive samples whose rows in the index are consecutive, too."""

    first_row: int
    ordinal: int
    samples: int


class SourceTexts:
    """The text index of the samples of a source. May be used by any thread.

    Args:
        source: The source.
        index: The index of its dataset.

    Raises:
        FormatError: If it was made for other data, or lacks samples.
    """

    def __init__(self, source: Any, index: TextIndex) -> None:
        self._path, self._index = source.path, index
        whole, self._excluded = source.unexcluded
        self._runs = list(self._laid_out(whole))

    def _laid_out(self, whole: Any) -> Iterator[_Run]:
        files, stamp = self._index.files, whole.index_stamp()
        if files.stamp != stamp:
            raise _unusable(self._path, "the dataset has changed since")
        run, ordinal = _Run(0, 0, 0), 0
        for number, (name, count, start, stop) in enumerate(whole.file_samples()):
            if start == stop:
                continue
            file = files.files.get(name)
            if file is None or file.num_samples != count or not files.is_indexed(name, start, stop):
                raise _unusable(self._path, f"it lacks samples of {name!r}")
            if stamp is None and file.stamp != whole.file_stamp(number):
                raise _unusable(self._path, f"{name!r} has changed since")
            row = file.first_row + start
            if run.samples and row == run.first_row + run.samples:
                run = run._replace(samples=run.samples + stop - start)
            else:
                if run.samples:
                    yield run
                run = _Run(row, ordinal, stop - start)
            ordinal += stop - start
        if run.samples:
            yield run

    def candidates(self, patterns: Sequence[str], start: int) -> Iterator[int] | None:
        """Return the samples from a number on that may have all patterns, ascending.

        None if all patterns are too short for the index.
        """
        if not any(map(trigrams, patterns)):
            return None
        return (ordinal for ordinal in self._matches(patterns, start) if ordinal >= start)

    def _matches(self, patterns: Sequence[str], start: int) -> Iterator[int]:
        excluded: Ints = self._excluded
        for first_row, ordinal, count in self._runs:
            # Without the excluded samples, numbers are smaller.
            low = max(0, start - ordinal)
            try:
                rows = self._index.candidates(patterns, first_row + low, first_row + count)
                for row in rows:
                    number = ordinal + row - first_row
                    before = int(np.searchsorted(excluded, number))
                    if before == len(excluded) or excluded[before] != number:
                        yield number - before
            except FormatError as error:
                raise _damaged(self._path) from error


def _damaged(path: AnyPath) -> FormatError:
    return _unusable(path, "it is damaged", " with --again")


def _unusable(path: AnyPath, problem: str, option: str = "") -> FormatError:
    shown = redact(os.fspath(path))
    return FormatError(
        f"the text index of {shown} cannot be used: {problem}; run `energon measure "
        f"{shell_word(shown)} --text`{option}"
    )


def stored_texts(path: AnyPath | str) -> SqliteFile | None:
    """Return the text index of a dataset, that of a remote one copied here; None if none."""
    address = beside_index(path, TEXT_INDEX)
    file = any_path(address)
    if not file.is_file():
        return None
    return local_copy(file)


def open_texts(source: Source) -> SourceTexts | None:
    """Return the text index of the samples of a source; None if there is none.

    Raises:
        ConfigError: If SQLite cannot read it.
        FormatError: If it is damaged, or was made for other data.
    """
    if not isinstance(source, NumbersFiles) or not isinstance(source, SplitSource):
        return None
    file = stored_texts(source.path)
    if file is None:
        return None
    try:
        index = TextIndex(file)
    except FormatError as error:
        raise _damaged(source.path) from error
    return SourceTexts(source, index)


def index_texts(
    path: str | os.PathLike[str],
    *,
    again: bool = False,
    engine: Engine | None = None,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> list[MeasureReport]:
    """Index the texts of a dataset, or of each dataset of a metadataset.

    Args:
        path: Where it is.
        again: Whether to index again the samples that are indexed.
        engine: Where to read samples; None for processes of this machine.
        wait: Whether to wait for another process that writes the dataset.
        progress: Called with the number of finished samples, and the total.

    Raises:
        DatasetNotFoundError: If there is no dataset.
        ConfigError: If a dataset cannot be indexed, or SQLite has no index of trigrams.
        DatasetBusyError: If another process writes the dataset.
        SampleError: If a sample cannot be read.
    """
    check_sqlite()
    return run_measure(
        path,
        TEXT_INDEX,
        lambda dataset, file: _TextStore(dataset, file, again=again),
        read_texts,
        engine=engine,
        wait=wait,
        progress=progress,
    )


def read_texts(source: Any, kind: str, ordinals: Ints) -> list[str]:
    """Return the texts of samples as they are indexed."""
    contents = kind_named(kind, os.fspath(source.path)).contents(source)
    indexed = []
    for start in range(0, len(ordinals), READ_TOGETHER):
        own = ordinals[start : start + READ_TOGETHER].tolist()
        contents.read_ahead(own)
        for ordinal in own:
            location = source.locate(ordinal)
            try:
                texts = texts_of(contents.files(ordinal), location.key)
                indexed.append("\n".join(map(index_text, texts)))
            except EnergonError as error:
                noun, shard = "reading the texts", location.shard
                raise measure_failed(source, shard, location.key, noun, error) from error
    return indexed


class _TextStore:
    """The text index of a dataset.

    Args:
        dataset: The dataset.
        path: Where the index is until it is complete.
        again: Whether to index again what is indexed.
    """

    def __init__(self, dataset: MeasuredDataset, path: Path, *, again: bool) -> None:
        self._dataset, self._path = dataset, path
        self._old: SqliteFile | None = None
        self._writer: TextIndexWriter | None = None
        self._indexed = IndexedFiles() if again else self._continued()
        if again:
            discard(path)

    def _continued(self) -> IndexedFiles:
        """Return the files of the index of a run that was killed, or else of the complete one."""
        if self._path.exists():
            try:
                with closing(sqlite3.connect(self._path)) as connection:
                    # This undoes what was not complete.
                    connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                return read_files(self._path)
            except (FormatError, sqlite3.DatabaseError):
                discard(self._path)
        try:
            old = stored_texts(self._dataset.address)
            indexed = IndexedFiles() if old is None else read_files(old)
        except FormatError:
            return IndexedFiles()  # it is replaced
        if indexed.is_sparse:
            return IndexedFiles()
        self._old = old
        return indexed

    def is_measured(self, piece: SampleRange) -> bool:
        """Return whether all samples of a piece are indexed."""
        name, indexed = piece.file, self._indexed
        is_same = indexed.has(name, self._dataset.files[name])
        return is_same and indexed.is_indexed(name, piece.start, piece.stop)

    def add(self, piece: SampleRange, results: list[str]) -> None:
        """Index the texts of a piece."""
        with reporting(self._path):
            self._opened().add(piece.file, piece.start, results)

    def _opened(self) -> TextIndexWriter:
        if self._writer is None:
            if self._old is not None:
                self._copy(self._old, self._path)
            self._writer = TextIndexWriter(self._path, self._indexed)
            self._writer.number(self._dataset.files)
        return self._writer

    def write(self) -> None:
        """Complete the index and put it beside that of the dataset, unless nothing has changed."""
        dataset, indexed = self._dataset, self._indexed
        is_same = indexed.stamp == dataset.index and indexed.files.keys() == dataset.files.keys()
        if is_same and not self._path.exists():
            return
        with reporting(self._path):
            self._opened().finish(dataset.index, dataset.files)
        self._writer = None
        if is_remote(dataset.target):
            dataset.upload(self._path)
        else:
            self._copy(self._path, Path(dataset.target))
            discard(self._path)

    def _copy(self, file: SqliteFile, target: Path) -> None:
        with reporting(target), atomic_path(target) as temporary:
            if isinstance(file, bytes):
                Path(temporary).write_bytes(file)
            else:
                shutil.copyfile(file, temporary)

    def close(self) -> None:
        """Close the index; if it is not complete, the next run continues it."""
        if self._writer is not None:
            self._writer.close()
