"""Datasets as trees of folders and files, to look into them like into a file system.

What a folder holds is asked for when somebody looks: nothing is listed in advance, and memory
does not grow with the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import NamedTuple, Protocol

from energon.io.range_file import RangeFile, open_range


class TreeEntry(NamedTuple):
    """What a folder lists."""

    name: str
    is_folder: bool


@dataclass(frozen=True)
class BrowsedFile:
    """A file: a range of another one, which is opened when somebody reads.

    Args:
        find: Opens the other file.
        offset: Where it begins there.
        size: Bytes of it.
        mtime_ns: When it was written, in nanoseconds since 1970; 0 if unknown.
    """

    find: Callable[[], RangeFile]
    offset: int
    size: int
    mtime_ns: int = 0

    def open(self) -> BufferedReader:
        """Return it to be read; for one thread at a time."""
        return open_range(self.find(), self.offset, self.size)

    def read(self) -> bytes:
        """Return all of it."""
        return self.find().pread(self.offset, self.size)


class BrowsedFolder(Protocol):
    """A folder. May be used by many threads."""

    def entries(self) -> Iterator[TreeEntry]:
        """Yield what it holds, each name once."""

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return what has this name, or None."""


@dataclass(frozen=True)
class NamedFolders:
    """A folder of folders that are known."""

    folders: Mapping[str, BrowsedFolder]

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the names of the folders."""
        return (TreeEntry(name, True) for name in self.folders)

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a folder by name."""
        return self.folders.get(name)


def first_file(folder: BrowsedFolder) -> BrowsedFile | None:
    """Return a file in a folder or below it, the first that is listed; None if there is none."""
    for name, _ in folder.entries():
        found = folder.find(name)
        if found is not None and not isinstance(found, BrowsedFile):
            found = first_file(found)
        if found is not None:
            return found
    return None


def find_path(root: BrowsedFolder, path: str) -> BrowsedFolder | BrowsedFile | None:
    """Return what lies at a path below a folder, as `a/b/c`; None if nothing does."""
    found: BrowsedFolder | BrowsedFile | None = root
    for name in path.split("/"):
        if not name:
            continue
        if found is None or isinstance(found, BrowsedFile):
            return None
        found = found.find(name)
    return found
