"""Contents by key on local disk, for all processes that use one folder."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path
from typing import Literal
from uuid import uuid4

from energon.cache.catalog import Catalog, Limits
from energon.cache.folder import SharedFolder

logger = logging.getLogger("energon")

Stored = Literal["stored", "present", "full", "failed"]


class DiskCache:
    """Contents in a folder that goes away with its last user. May be used by many threads.

    Args:
        parent: Where the folder is made; None for the system's folder of temporary files.
        name: Which folder below it.
        limits: What all processes together may keep.
    """

    def __init__(self, parent: str | os.PathLike[str] | None, name: str, limits: Limits) -> None:
        self.limits = limits
        self._folder = SharedFolder(parent, name)
        self._catalog = Catalog(self._folder.path, limits, uuid4().hex)
        self._warned = False

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    def find(self, key: str, *, pin: bool) -> str | None:
        """Return what was noted about a content; None if absent.

        Args:
            key: Its key.
            pin: Whether to keep it until `release`.
        """
        try:
            return self._catalog.find(key, pin=pin)
        except sqlite3.Error as error:
            self._warn(error)
            return None

    def read(self, key: str) -> bytes | None:
        """Return a content that was found or stored; None if it is not there any more."""
        try:
            return self._catalog.path(key).read_bytes()
        except FileNotFoundError:
            pass
        try:
            self._catalog.discard_lost(key)
        except sqlite3.Error as error:
            self._warn(error)
        return None

    def store(self, key: str, data: bytes, about: str) -> Stored:
        """Keep a content until `release`, and longer if there is room.

        Args:
            key: Its key.
            data: The content.
            about: What to note about it.

        Returns:
            "full" if there is no room as long as nothing is released, "present" if another
            process has stored it or is about to, "failed" if the disk does not take it.
        """
        if len(data) > self.limits.max_bytes:
            return "failed"
        try:
            reserved = self._catalog.reserve(key, len(data))
            if reserved != "reserved":
                return reserved
            self._write(key, data)
            self._catalog.written(key, about)
        except (OSError, sqlite3.Error) as error:
            self._warn(error)
            self.drop(key)
            return "failed"
        return "stored"

    def release(self, keys: list[str]) -> bool:
        """Let contents be dropped when room is needed. Return False if that has to be retried."""
        try:
            self._catalog.release(keys)
        except sqlite3.Error as error:
            self._warn(error)
            return False
        return True

    def drop(self, key: str) -> None:
        """Delete a content now."""
        try:
            self._catalog.discard(key)
        except sqlite3.Error as error:
            self._warn(error)

    def usage(self) -> tuple[int, int]:
        """Return how many bytes and contents there are, of all processes."""
        return self._catalog.usage()

    def close(self) -> None:
        """Stop using the folder."""
        try:
            self._catalog.close()
        except sqlite3.Error as error:
            self._warn(error)
        finally:
            self._folder.leave()

    def _write(self, key: str, data: bytes) -> None:
        path = self._catalog.path(key)
        temporary = path.with_name(f"{key}.{self._catalog.user}")
        try:
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _warn(self, error: OSError | sqlite3.Error) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "cache %s: %s; files are read from their stores instead. Lower "
                "max_cache_size_gbytes, or name another parent_cache_dir",
                self.path,
                error,
            )
