"""The catalog of a disk cache: its entries, their sizes and users, shared by all processes.

It is an SQLite database in the folder of the cache. It lives no longer than the cache, so nothing
is synced to disk; each step is one transaction, so a process that dies leaves whole steps behind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from energon.io.disk_cache import CachePolicy, DiskCache, make_room
from energon.io.file_lock import FileLock

BUSY_SECONDS = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    writer TEXT,
    about TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (used) WHERE writer IS NULL;
CREATE TABLE IF NOT EXISTS pins (
    key TEXT, user TEXT, PRIMARY KEY (key, user)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (bytes INTEGER NOT NULL, count INTEGER NOT NULL, clock INTEGER);
INSERT INTO usage SELECT 0, 0, 0 WHERE NOT EXISTS (SELECT * FROM usage);
CREATE TRIGGER IF NOT EXISTS add_entry AFTER INSERT ON entries BEGIN
    UPDATE usage SET bytes = bytes + new.bytes, count = count + 1;
END;
CREATE TRIGGER IF NOT EXISTS drop_entry AFTER DELETE ON entries BEGIN
    UPDATE usage SET bytes = bytes - old.bytes, count = count - 1;
END;
"""
_ABOUT = "SELECT about FROM entries WHERE key = ? AND writer IS NULL"
_OLDEST = """
SELECT key, bytes FROM entries
WHERE writer IS NULL AND NOT EXISTS (SELECT * FROM pins WHERE pins.key = entries.key)
ORDER BY used LIMIT 64
"""


CONTENTS = CachePolicy(
    entries=lambda folder: folder.glob("??/*"),
    beside=lambda path: (),
    warning="cache %s: %s; files are read from their stores instead. Lower max_cache_size_gbytes, "
    "or name another parent_cache_dir",
)
"""The policy of contents that live no longer than their users."""


class CacheLimits(NamedTuple):
    """Limits on the contents of a cache."""

    max_bytes: int
    max_count: int


class Catalog:
    """The entries of a cache, as seen by one process. May be used by many threads.

    Args:
        folder: The folder of the cache.
        limits: Maximum size and number of entries.
        user: A name for this process, unique among all.
    """

    def __init__(self, folder: Path, limits: CacheLimits, user: str) -> None:
        self.folder = folder
        self.limits = limits
        self.user = user
        self._cache = DiskCache(folder, max_bytes=limits.max_bytes, policy=CONTENTS)
        self._mutex = Lock()
        users = folder / "users"
        users.mkdir(exist_ok=True)
        self._lock = FileLock(users / user, permissions=0o600)
        self._lock.hold()
        try:
            self._connection = sqlite3.connect(
                folder / "catalog.sqlite",
                isolation_level=None,
                timeout=BUSY_SECONDS,
                check_same_thread=False,
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = OFF")
            with self._transaction():
                for statement in _statements(_SCHEMA):
                    self._connection.execute(statement)
                self._forget_dead_users()
        except BaseException:
            self._lock.close()
            raise

    def path(self, key: str) -> Path:
        """Return the path of the content of an entry."""
        return self.folder / key[:2] / key

    def find(self, key: str, *, pin: bool) -> str | None:
        """Return the note stored with an entry; None if absent.

        Args:
            key: Its key.
            pin: Whether to keep it from being dropped.
        """
        with self._mutex:
            # Mostly it is absent; finding that out needs no lock that blocks others.
            if self._connection.execute(_ABOUT, (key,)).fetchone() is None:
                return None
        with self._transaction():
            row = self._connection.execute(_ABOUT, (key,)).fetchone()
            if row is None:
                return None
            self._use(key, pin=pin)
            return str(row[0])

    def reserve(self, key: str, size: int) -> Literal["reserved", "present", "full"]:
        """Make room for an entry of `size` bytes by dropping the least recently used ones.

        Entries in use are never dropped.

        Returns:
            "reserved" if this process should write it, "present" if another has written or is
            writing it, "full" if there is no room at present.
        """
        with self._transaction():
            if self._connection.execute("SELECT * FROM entries WHERE key = ?", (key,)).fetchone():
                return "present"
            if not self._make_room(size):
                self._forget_dead_users()
                if not self._make_room(size):
                    return "full"
            self._connection.execute(
                "INSERT INTO entries VALUES (?, ?, 0, ?, NULL)", (key, size, self.user)
            )
        return "reserved"

    def written(self, key: str, about: str) -> None:
        """Record that a reserved entry was written, and pin it."""
        with self._transaction():
            self._connection.execute(
                "UPDATE entries SET writer = NULL, about = ? WHERE key = ?", (about, key)
            )
            self._use(key, pin=True)

    def discard(self, key: str) -> None:
        """Remove an entry that was reserved but not written, or whose file is gone."""
        with self._transaction():
            self._drop(key)

    def discard_lost(self, key: str, inode: int | None) -> None:
        """Remove an entry whose content was deleted or damaged.

        Args:
            key: Its key.
            inode: Inode of the damaged file; None if there was no file.
        """
        with self._transaction():
            # If it is being rewritten, it has a writer or is another file.
            written = self._connection.execute(_ABOUT, (key,)).fetchone() is not None
            if written and _inode(self.path(key)) in (None, inode):
                self._drop(key)

    def release(self, keys: Sequence[str]) -> None:
        """Remove this process's pins on entries."""
        with self._transaction():
            self._connection.executemany(
                "DELETE FROM pins WHERE key = ? AND user = ?", [(key, self.user) for key in keys]
            )

    def usage(self) -> tuple[int, int]:
        """Return bytes and number of all entries."""
        with self._transaction():
            return self._usage()

    def close(self) -> None:
        """Stop using the cache."""
        try:
            with self._transaction():
                self._forget(self.user)
        finally:
            self._connection.close()
            (self.folder / "users" / self.user).unlink(missing_ok=True)
            self._lock.close()

    def _usage(self) -> tuple[int, int]:
        found = self._connection.execute("SELECT bytes, count FROM usage").fetchone()
        return int(found[0]), int(found[1])

    def _use(self, key: str, *, pin: bool) -> None:
        self._connection.execute("UPDATE usage SET clock = clock + 1")
        self._connection.execute(
            "UPDATE entries SET used = (SELECT clock FROM usage) WHERE key = ?", (key,)
        )
        if pin:
            self._connection.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (key, self.user))

    def _make_room(self, size: int) -> bool:
        used, count = self._usage()
        return make_room(
            self._oldest(),
            self._drop,
            used + size - self.limits.max_bytes,
            count + 1 - self.limits.max_count,
        )

    def _oldest(self) -> Iterator[tuple[str, int]]:
        """Yield entries that nobody uses, each of which is dropped before the next."""
        while found := self._connection.execute(_OLDEST).fetchall():
            yield from found

    def _drop(self, key: str) -> None:
        # The file first: a row without a file is noticed, a file without a row is not.
        self._cache.discard(self.path(key))
        self._connection.execute("DELETE FROM pins WHERE key = ?", (key,))
        self._connection.execute("DELETE FROM entries WHERE key = ?", (key,))

    def _forget_dead_users(self) -> None:
        for path in (self.folder / "users").iterdir():
            if path.name != self.user and _is_abandoned(path):
                self._forget(path.name)
                path.unlink(missing_ok=True)

    def _forget(self, user: str) -> None:
        self._connection.execute("DELETE FROM pins WHERE user = ?", (user,))
        unwritten = self._connection.execute("SELECT key FROM entries WHERE writer = ?", (user,))
        for (key,) in unwritten.fetchall():
            self._drop(key)
        for path in self.folder.glob(f"*/*.{user}"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                # On a full disk SQLite has rolled back on its own.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _is_abandoned(path: Path) -> bool:
    try:
        lock = FileLock(path, create=False)
    except FileNotFoundError:
        return False
    with lock:
        return lock.hold(wait=False)


def _statements(script: str) -> list[str]:
    """Return the statements of a script; `executescript` would end the transaction."""
    statements, current = [], ""
    for line in script.strip().splitlines():
        current += line + "\n"
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
