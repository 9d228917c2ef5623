"""Datasets as trees of folders and files, to look into them like into a file system.

What a folder holds is asked for when somebody looks: nothing is listed in advance, and memory
does not grow with the number of samples.

Names come from tar files that anybody may have written. Each step of a path becomes a name that
stands for itself, leads nowhere else, and is not too long for a kernel:

| step | becomes | as in |
|---|---|---|
| an empty one | `%` | `a//b.txt`, `/etc/passwd.txt` |
| `.` and `..` | `%2E` and `%2E%2E` | `../../a.txt` |
| `%`, and a zero byte or a slash in a step | `%25`, `%00`, `%2F` | `100%.txt` |

A mark at the end, `%~` and letters, tells things apart that would have the same name, and stands
for the rest of names that are too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from typing import NamedTuple, Protocol

from energon.io.range_file import RangeFile, open_range

MAX_BYTES = 255
"""What file systems and programs take for the longest name."""
MARK = "%~"
_DOTS = {"": "%", ".": "%2E", "..": "%2E%2E"}
_NAMES = {escaped: name for name, escaped in _DOTS.items()}
_ESCAPED = {"%": "%25", "\0": "%00", "/": "%2F"}
_IMPOSSIBLE = frozenset("/\0")
_SEQUENCE = re.compile(r"%(..)?", re.DOTALL)
_RAW = {escaped[1:]: raw for raw, escaped in _ESCAPED.items()}


def escape_name(name: str) -> str:
    """Return what one step of a path is called in the file system.

    Example:
        >>> [escape_name(name) for name in ("cat", "..", "", "100%")]
        ['cat', '%2E%2E', '%', '100%25']
    """
    if name in _DOTS:
        return _DOTS[name]
    if "%" in name or "\0" in name or "/" in name:
        name = re.sub("[%\0/]", lambda found: _ESCAPED[found[0]], name)
    data = name.encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return name
    mark = MARK + blake2b(data, digest_size=8).hexdigest()
    return data[: MAX_BYTES - len(mark) - 3].decode("utf-8", "ignore") + mark


def mark_name(name: str, mark: str) -> str:
    """Return an escaped name with a mark, so that it is the name of nothing else.

    Example:
        >>> mark_name("cat.jpg", "2")
        'cat.jpg%~2'
    """
    data = f"{name}{MARK}{mark}".encode("utf-8", "surrogateescape")
    if len(data) <= MAX_BYTES:
        return f"{name}{MARK}{mark}"
    whole = blake2b(data, digest_size=8).hexdigest()
    return name[: MAX_BYTES // 4 - len(whole)] + MARK + whole


def unescape_name(name: str) -> str | None:
    """Return the step that `escape_name` has made a name of; None if none, or if it has a mark.

    Example:
        >>> [unescape_name(name) for name in ("cat", "%2E%2E", "100%25", "100%")]
        ['cat', '..', '100%', None]
    """
    if name in _NAMES:
        return _NAMES[name]
    if "\0" in name or "/" in name:
        return None
    if not _IMPOSSIBLE.isdisjoint(name):
        return None
    if "%" not in name:
        return None if name in _DOTS else name
    if any(sequence not in _RAW for sequence in _SEQUENCE.findall(name)):
        return None
    raw = _SEQUENCE.sub(lambda found: _RAW[found[1]], name)
    return None if raw in _DOTS else raw


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
