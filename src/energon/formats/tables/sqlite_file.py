"""Read immutable SQLite files from untrusted sources.

An index is plain tables; that of texts has a virtual one, whose statement the reader knows. What
else SQLite can keep in a file — views, triggers, other virtual tables, computed columns — makes it
run what the file says, so a file with any of these is refused. Damaged pages may still lead round
in circles: every query has a number of steps that grows with the file, and values have a largest
size.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import local
from typing import Any, Self
from urllib.parse import quote

from energon.errors import FormatError, StorageError, TruncatedError
from energon.limits import SQLITE_STEPS, SQLITE_TABLES, SQLITE_VALUE_BYTES
from energon.local_file import open_binary

SqliteFile = Path | bytes
"""Where a file is; or its content, of one that no disk has room for."""

WRITTEN_ROWS = 10_000
FREE_STEPS = 1_000_000
"""Steps that any query may take, however small the file."""
MAX_STATEMENT = 10_000
"""Characters of the statement of a table or index."""
STEPS_BETWEEN = 10_000
"""Steps after which SQLite asks whether to continue."""

_TABLE = re.compile(r"CREATE\s+TABLE\b", re.IGNORECASE)
_NAME = r'(?:\w+|"[^"]*"|`[^`]*`|\[[^\]]*\])'
_COLUMN = rf"\s*{_NAME}(?:\s+(?:ASC|DESC))?\s*"
_INDEX = re.compile(
    rf"CREATE\s+(?:UNIQUE\s+)?INDEX\s+{_NAME}\s+ON\s+{_NAME}\s*\({_COLUMN}(?:,{_COLUMN})*\)\s*",
    re.IGNORECASE,
)
_SETTINGS = (
    "trusted_schema = OFF",
    "query_only = ON",
    "cell_size_check = ON",
    "ignore_check_constraints = ON",
)
_SCHEMA = "SELECT type, name, sql FROM sqlite_schema"
_COLUMNS = "SELECT name FROM pragma_table_xinfo(?) WHERE hidden != 0"


class SqliteReader:
    """Rows of an immutable file: one that is only ever replaced as a whole.

    Takes no lock. To be closed, and used by one thread.

    Args:
        file: The file.
        virtual: The statements of virtual tables that it may have.

    Raises:
        FormatError: If it is not an SQLite file, is damaged, or holds anything but these tables.
        TruncatedError: If its end is missing.
    """

    def __init__(self, file: SqliteFile, virtual: Collection[str] = ()) -> None:
        self.name = name_of(file)
        self._virtual = virtual
        self._steps = 0
        with self._reporting():
            if isinstance(file, bytes):
                self._size = len(file)
                self._connection = sqlite3.connect(":memory:")
            else:
                self._size = _size_of(file)
                address = f"file:{quote(os.fsencode(file.resolve()))}?mode=ro&immutable=1"
                self._connection = sqlite3.connect(address, uri=True)
        try:
            with self._reporting():
                if isinstance(file, bytes):
                    self._connection.deserialize(file)
                self._restrict()
            self._check_size()
            self.tables = self._plain_tables()
            """The statements that make the tables, by name."""
        except BaseException:
            self.close()
            raise

    def rows(self, query: str, arguments: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query.

        Raises:
            FormatError: If the file is damaged.
        """
        with self._reporting():
            self._steps = 0
            cursor = self._connection.execute(query, arguments)
            rows = cursor.fetchmany(WRITTEN_ROWS)
        while rows:
            yield from rows
            with self._reporting():
                rows = cursor.fetchmany(WRITTEN_ROWS)

    def first(self, query: str, arguments: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None, see `rows`."""
        with self._reporting():
            self._steps = 0
            row: tuple[Any, ...] | None = self._connection.execute(query, arguments).fetchone()
        return row

    def numbers(self, *values: Any) -> tuple[int, ...]:
        """Return values of a row, checked to be integers from 0 up.

        Columns of SQLite take values of any type.

        Raises:
            FormatError: If one is not.
        """
        for value in values:
            if not isinstance(value, int) or value < 0:
                raise FormatError(
                    f"{self.name}: expected a number of bytes or of a sample, found "
                    f"{str(value)[:100]!r}; run `energon prepare` again"
                )
        return values

    def text(self, value: Any) -> str:
        """Return a value of a row, checked to be text; see `numbers`."""
        if isinstance(value, str):
            return value
        raise FormatError(
            f"{self.name}: expected a name, found {str(value)[:100]!r}; run `energon prepare` again"
        )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_size(self) -> None:
        """Raise TruncatedError if the last page is not whole, which SQLite overlooks."""
        (pages,), (page_bytes,) = (
            self.first(f"PRAGMA {name}") or (0,) for name in ("page_count", "page_size")
        )
        if self._size < pages * page_bytes:
            raise TruncatedError(
                f"{self.name}: has {self._size} bytes, expected {pages * page_bytes}; run `energon "
                "prepare` again"
            )

    def _restrict(self) -> None:
        connection = self._connection
        connection.text_factory = _text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, SQLITE_VALUE_BYTES.value)
        connection.set_progress_handler(self._count_steps, STEPS_BETWEEN)
        self._most_steps = FREE_STEPS + SQLITE_STEPS.value * self._size
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")

    def _count_steps(self) -> bool:
        """Return whether a query must end because it takes too many steps."""
        self._steps += STEPS_BETWEEN
        return self._steps > self._most_steps

    def _plain_tables(self) -> dict[str, str]:
        """Return all tables; refuse a schema with anything but plain tables and indexes."""
        most, tables = SQLITE_TABLES.value, {}
        for number, (kind, name, sql) in enumerate(self.rows(_SCHEMA)):
            if number >= most:
                raise self._strange(f"has more than {most} tables and indexes", SQLITE_TABLES.hint)
            text = str(sql)[:MAX_STATEMENT]
            is_table = _TABLE.match(text) or sql in self._virtual
            if kind == "table" and isinstance(name, str) and is_table:
                tables[name] = text
            elif kind != "index" or not (sql is None or _INDEX.fullmatch(text)):
                raise self._strange(f"has the {str(kind)[:100]} {str(name)[:100]!r}")
        for name, text in tables.items():
            if text not in self._virtual and self.first(_COLUMNS, (name,)) is not None:
                raise self._strange(f"has columns in {name[:100]!r} that are computed")
        return tables

    def _strange(self, problem: str, more: str = "") -> FormatError:
        return FormatError(
            f"{self.name}: {problem}, where an index is a few plain tables; run `energon prepare` "
            f"again{'; ' if more else ''}{more}"
        )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Translate SQLite's errors to ours."""
        try:
            yield
        except UnicodeEncodeError:
            raise  # of an argument: bytes that are not text, so no row can have them
        except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as error:
            if self._steps and self._steps > self._most_steps:
                raise FormatError(
                    f"{self.name}: a query takes more than {self._most_steps} steps, more "
                    "than an index of its size needs; run `energon prepare` again; "
                    f"{SQLITE_STEPS.hint}"
                ) from error
            raise FormatError(f"{self.name}: {error}; run `energon prepare` again") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _size_of(path: Path) -> int:
    try:
        # SQLite opens any file, and would wait for the other end of a pipe.
        with open_binary(path) as file:
            return os.fstat(file.fileno()).st_size
    except StorageError:
        raise
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; run `energon prepare` again") from error


def name_of(file: SqliteFile) -> str:
    """Return the name of a file for messages."""
    return "index.sqlite" if isinstance(file, bytes) else str(file)


@contextmanager
def writing_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn SQLite's errors of a full or failing disk into those of the system, which name `path`.

    Other errors pass.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        number = _SYSTEM_ERRORS.get(error.sqlite_errorcode)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from error


_SYSTEM_ERRORS = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_IOERR_WRITE: errno.EIO}


def get_mark(path: Path) -> int | None:
    """Return the number that `set_mark` stored in a file; None if there is no such file."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path)) as connection:
        try:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.DatabaseError:
            return None


def set_mark(path: Path, number: int) -> None:
    """Store a number in a file, creating it if necessary."""
    with writing_file(path), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {number}")


class ThreadReaders:
    """Readers of one file, one for each thread and process.

    Args:
        file: The file.
        virtual: The statements of virtual tables that it may have.
    """

    def __init__(self, file: SqliteFile, virtual: Collection[str] = ()) -> None:
        self.file = file
        self._virtual = virtual
        self._own = local()

    def get(self) -> SqliteReader:
        """Return the reader of this thread.

        Raises:
            FormatError: If the file is damaged.
        """
        own = self._own
        if getattr(own, "pid", None) != os.getpid():
            own.reader = SqliteReader(self.file, self._virtual)
            own.pid = os.getpid()
        reader: SqliteReader = own.reader
        return reader
