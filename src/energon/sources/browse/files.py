"""Folders of files as trees: those of auxiliary data, here or in an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from energon.errors import DatasetNotFoundError
from energon.io.epath import EPath
from energon.io.files import list_files
from energon.io.local import OpenFile
from energon.io.range_file import RemoteFile
from energon.sources.browse.names import escape_name, unescape_name
from energon.sources.browse.tree import BrowsedFile, BrowsedFolder, TreeEntry


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine."""

    path: Path

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders; sockets and the like are left out."""
        with os.scandir(self.path) as found:
            for entry in found:
                if entry.is_dir() or entry.is_file():
                    yield TreeEntry(entry.name, entry.is_dir())

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a file or folder by name."""
        if name in ("", ".", "..") or "/" in name:
            return None
        path = self.path / name
        if path.is_dir():
            return LocalFolder(path)
        try:
            about = path.stat()
            opener = partial(OpenFile, str(path))
            return BrowsedFile(opener, 0, about.st_size, about.st_mtime_ns)
        except (DatasetNotFoundError, OSError):
            return None


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of an object store, which is listed when somebody looks."""

    address: EPath

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders."""
        return self._listed.entries()

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a file or folder by name."""
        return self._listed.find(name)

    @cached_property
    def _listed(self) -> _Listed:
        tree: dict[str, Any] = {}
        for info in list_files(self.address):
            *folders, name = info.key.split("/")
            inner = tree
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = info
        return _Listed(self.address, tree)


@dataclass(frozen=True)
class _Listed:
    """A folder whose content is known."""

    address: EPath
    tree: dict[str, Any]

    def entries(self) -> Iterator[TreeEntry]:
        for name, content in self.tree.items():
            yield TreeEntry(escape_name(name), isinstance(content, dict))

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        raw = unescape_name(name)
        content = None if raw is None else self.tree.get(raw)
        if raw is None or content is None:
            return None
        if isinstance(content, dict):
            return _Listed(self.address / raw, content)
        opener = partial(RemoteFile, (self.address / raw).url)
        return BrowsedFile(opener, 0, content.size, content.mtime_ns)
