"""Read SQLite files that nobody writes while they are read."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from threading import local
from typing import Any
from urllib.parse import quote

from energon.errors import FormatError, TruncatedError

SqliteFile = Path | bytes
"""Where a file is; or its content, of one that no disk has room for."""


def open_readonly(path: SqliteFile) -> sqlite3.Connection:
    """Open a file that stays as it is, as those do that are replaced as a whole. Takes no lock.

    Raises:
        FormatError: If there is no SQLite file.
    """
    connection = None
    try:
        if isinstance(path, bytes):
            connection = sqlite3.connect(":memory:")
            connection.deserialize(path)
        else:
            address = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
            connection = sqlite3.connect(address, uri=True)
        connection.execute("SELECT * FROM sqlite_schema LIMIT 1").fetchall()
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise FormatError(f"{name_of(path)}: {error}; run `energon prepare` again") from error
    return connection


def name_of(file: SqliteFile) -> str:
    """Return what messages call a file."""
    return "index.sqlite" if isinstance(file, bytes) else str(file)


def check_size(connection: sqlite3.Connection, path: str | os.PathLike[str]) -> None:
    """Raise FormatError if the file of a connection has lost its end."""
    (pages,), (page_bytes,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
    )
    size = os.path.getsize(path)
    if size < pages * page_bytes:
        raise TruncatedError(f"{path}: has {size} bytes, wanted are {pages * page_bytes}")


def table_names(connection: sqlite3.Connection) -> set[str]:
    """Return the names of all tables."""
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}


def get_mark(path: Path) -> int | None:
    """Return the number that `set_mark` has left in a file; None if there is no such file."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path)) as connection:
        try:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.DatabaseError:
            return None


def set_mark(path: Path, number: int) -> None:
    """Leave a number in a file, which is made if there is none."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version = {number}")


class ThreadConnections:
    """A connection for each thread and process that asks, to the same file.

    Args:
        path: The file.
    """

    def __init__(self, path: SqliteFile) -> None:
        self.path = path
        self._own = local()

    def fetch_one(self, query: str, arguments: tuple[Any, ...]) -> Any:
        """Return the first row that a query gives, or None."""
        return self._connection().execute(query, arguments).fetchone()

    def fetch_all(self, query: str, arguments: tuple[Any, ...]) -> list[Any]:
        """Return all rows that a query gives."""
        return self._connection().execute(query, arguments).fetchall()

    def _connection(self) -> sqlite3.Connection:
        own = self._own
        if getattr(own, "pid", None) != os.getpid():
            own.connection = open_readonly(self.path)
            own.pid = os.getpid()
        connection: sqlite3.Connection = own.connection
        return connection
