"""A tree of folders and files as a file system, by FUSE."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from energon.errors import EnergonError, MissingExtraError
from energon.sources.browse import BrowsedFile, Folder, find_path

try:
    import mfusepy
except ImportError as error:
    raise MissingExtraError("mounting needs mfusepy; install energon-loader[mount]") from error
except OSError as error:
    raise MissingExtraError(
        f"mounting needs libfuse ({error}); install the package fuse3 or libfuse2 of the system"
    ) from error

KEPT_PATHS = 1 << 16


class Files(mfusepy.Operations):  # type: ignore[misc]
    """Answers the questions of the kernel about a tree, all of them read-only.

    Args:
        root: The tree.
    """

    use_ns = True

    def __init__(self, root: Folder) -> None:
        self._find = lru_cache(KEPT_PATHS)(lambda path: find_path(root, path))
        self._owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return what `ls -l` shows."""
        found = self._at(path)
        if isinstance(found, BrowsedFile):
            return {
                "st_mode": stat.S_IFREG | 0o444,
                "st_nlink": 1,
                "st_size": found.size,
                "st_blocks": -(-found.size // 512),
                "st_mtime": found.mtime_ns,
                **self._owner,
            }
        return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2, **self._owner}

    def readdir(self, path: str, fh: int) -> Iterator[Any]:
        """Yield the names in a folder."""
        found = self._at(path)
        if isinstance(found, BrowsedFile):
            raise mfusepy.FuseOSError(errno.ENOTDIR)
        yield from (".", "..")
        for name, is_folder in found.entries():
            yield name, stat.S_IFDIR if is_folder else stat.S_IFREG, 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Return a piece of a file."""
        found = self._at(path)
        if not isinstance(found, BrowsedFile):
            raise mfusepy.FuseOSError(errno.EISDIR)
        try:
            return found.read(offset, size)
        except EnergonError as error:
            raise mfusepy.FuseOSError(errno.EIO) from error

    def _at(self, path: str) -> Folder | BrowsedFile:
        found: Folder | BrowsedFile | None = self._find(path)
        if found is None:
            raise mfusepy.FuseOSError(errno.ENOENT)
        return found


def serve(root: Folder, mountpoint: str, *, name: str, foreground: bool) -> None:
    """Mount a tree, and answer until it is unmounted."""
    mfusepy.FUSE(
        Files(root),
        mountpoint,
        foreground=foreground,
        ro=True,
        fsname=name,
        subtype="energon",
        kernel_cache=True,
        entry_timeout=3600,
        attr_timeout=3600,
        negative_timeout=3600,
    )
