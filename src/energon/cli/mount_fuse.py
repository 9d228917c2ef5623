"""Serve a tree of folders and files as a file system, through FUSE."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader
from threading import Lock
from typing import Any

from energon.errors import EnergonError, MissingExtraError, needs_extra
from energon.sources.tree import MAX_BYTES, BrowsedFile, BrowsedFolder, TreeEntry, find_path

try:
    with needs_extra("mount", "mounting needs mfusepy"):
        import mfusepy
except OSError as error:
    raise MissingExtraError(
        f"mounting needs libfuse ({error}); install the system package fuse3 or libfuse2"
    ) from error

logger = logging.getLogger("energon")
KEPT_PATHS = 1 << 16
KEPT_SECONDS = 3600
"""How long the kernel may cache answers: the contents of the mount do not change."""


@contextmanager
def _reporting(path: str) -> Iterator[None]:
    """Turn exceptions into error codes, and log what happened."""
    try:
        yield
    except EnergonError as error:
        logger.warning("%s: %s", path, error)
        raise mfusepy.FuseOSError(errno.EIO) from error


class MountedFiles(mfusepy.Operations):  # type: ignore[misc]
    """Answers the kernel's requests about a tree, all of them read-only.

    Args:
        root: The tree.
    """

    use_ns = True

    def __init__(self, root: BrowsedFolder) -> None:
        self._find = lru_cache(KEPT_PATHS)(lambda path: find_path(root, path))
        self._directory = os.getcwd()
        self._owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        self._numbers = itertools.count(1)
        self._listings: dict[int, Listing] = {}
        self._streams: dict[int, tuple[BufferedReader, Lock]] = {}
        self.is_mounted = False
        """Whether the kernel has ever asked for anything."""

    def init(self, path: str) -> None:
        """Record that the kernel has begun to send requests."""
        self.is_mounted = True
        # libfuse 3 changes to the root folder, where relative paths in settings would be wrong.
        with suppress(OSError):
            os.chdir(self._directory)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return the attributes that `ls -l` shows."""
        entry = self._at(path)
        if isinstance(entry, BrowsedFile):
            return {
                "st_mode": stat.S_IFREG | 0o444,
                "st_nlink": 1,
                "st_size": entry.size,
                "st_blocks": -(-entry.size // 512),
                "st_mtime": entry.mtime_ns,
                "st_ctime": entry.mtime_ns,
                **self._owner,
            }
        return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2, **self._owner}

    def opendir(self, path: str) -> int:
        """Begin to list a folder."""
        entry = self._at(path)
        if isinstance(entry, BrowsedFile):
            raise mfusepy.FuseOSError(errno.ENOTDIR)
        number = next(self._numbers)
        with _reporting(path):
            self._listings[number] = Listing(entry)
        return number

    def readdir_with_offset(self, path: str, offset: int, fh: int) -> Iterator[Any]:
        """Yield the names in a folder, starting at one, as long as there is room for them."""
        with _reporting(path):
            for name, is_folder, following in self._listings[fh].since(offset):
                yield name, stat.S_IFDIR if is_folder else stat.S_IFREG, following

    def releasedir(self, path: str, fh: int) -> int:
        """End a listing."""
        del self._listings[fh]
        return 0

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        entry = self._at(path)
        if not isinstance(entry, BrowsedFile):
            raise mfusepy.FuseOSError(errno.EISDIR)
        number = next(self._numbers)
        with _reporting(path):
            self._streams[number] = entry.open(), Lock()
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Return a piece of an open file."""
        stream, lock = self._streams[fh]
        with _reporting(path), lock:  # several threads may read a file
            stream.seek(offset)
            return stream.read(size)

    def release(self, path: str, fh: int) -> int:
        """Close a file."""
        del self._streams[fh]
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """Return the numbers that `df` shows: no free space."""
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": MAX_BYTES}

    def _at(self, path: str) -> BrowsedFolder | BrowsedFile:
        with _reporting(path):
            entry: BrowsedFolder | BrowsedFile | None = self._find(path)
        if entry is None:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return entry


class Listing:
    """A folder being listed, some names at a time; only those are held in memory.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: BrowsedFolder) -> None:
        self._folder = folder
        self._entries: Iterator[TreeEntry] = iter(())
        self._held: TreeEntry | None = None
        self._position = 0
        self._begin()

    def since(self, offset: int) -> Iterator[tuple[str, bool, int]]:
        """Yield names from number `offset` on: name, whether a folder, number of the next.

        After stopping in the middle, the last entry is yielded again: there was no room for it.
        """
        if offset < self._position:
            self._begin()
        while self._held is not None:
            if self._position >= offset:
                yield *self._held, self._position + 1
            self._held = next(self._entries, None)
            self._position += 1

    def _begin(self) -> None:
        dots = (TreeEntry(".", True), TreeEntry("..", True))
        self._entries = itertools.chain(dots, self._folder.entries())
        self._held = next(self._entries, None)
        self._position = 0


def serve(root: BrowsedFolder, mountpoint: str, *, name: str) -> None:
    """Mount a tree, and serve it until it is unmounted.

    Raises:
        RuntimeError: If it cannot be mounted.
    """
    files = MountedFiles(root)
    try:
        mfusepy.FUSE(
            files,
            mountpoint,
            foreground=True,
            ro=True,
            fsname=name,
            subtype="energon",
            kernel_cache=True,
            entry_timeout=KEPT_SECONDS,
            attr_timeout=KEPT_SECONDS,
            negative_timeout=KEPT_SECONDS,
        )
    except RuntimeError:
        # libfuse 3 also reports this when it was ended by a signal, such as by Ctrl-C.
        if not files.is_mounted:
            raise
