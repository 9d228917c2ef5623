"""The files of a folder without shards, on this machine or in an object store."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from energon.errors import DatasetNotFoundError, ObjectChangedError
from energon.formats.tables.media_table import MediaJob
from energon.io.address import join_address
from energon.io.backends.base import ObjectInfo
from energon.io.files import open_store
from energon.io.range_file import REMOTE_BUFFER_BYTES, RawReader, RemoteFile
from energon.prepare.files import file_state, list_dataset_files, reporting

MEDIA_HEAD_BYTES = 64 << 10
"""How much of a remote file is fetched first: enough for the headers of nearly all images."""


class FolderFiles(Protocol):
    """Files by their paths below a folder. Can be pickled."""

    def names(self) -> list[str]:
        """Return all paths, sorted."""

    def job(self, name: str) -> MediaJob:
        """Return a file as it is now, or as it was when the folder was listed."""

    def only(self, names: Sequence[str]) -> FolderFiles:
        """Return what is needed to open some of the files."""

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order. Each is closed when the next one is requested."""


@dataclass(frozen=True)
class LocalFiles:
    """The files of a folder on this machine."""

    folder: Path

    def names(self) -> list[str]:
        """Return all paths, sorted."""
        return list_dataset_files(self.folder)

    def job(self, name: str) -> MediaJob:
        """Return a file as it is now."""
        return MediaJob(name, *file_state(self.folder / name))

    def only(self, names: Sequence[str]) -> LocalFiles:
        """Return the folder itself: files are opened by their paths."""
        return self

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order."""
        for name in names:
            path = self.folder / name
            with reporting(path), path.open("rb") as stream:
                yield stream


@dataclass(frozen=True)
class RemoteFiles:
    """The files of a folder in an object store.

    Args:
        address: The folder.
        listed: What the store reported about each file, by path.
    """

    address: str
    listed: Mapping[str, ObjectInfo]

    def names(self) -> list[str]:
        """Return all paths, sorted."""
        return sorted(self.listed)

    def job(self, name: str) -> MediaJob:
        """Return a file as it was when the folder was listed."""
        return MediaJob(name, self.listed[name].size, self.listed[name].mtime_ns)

    def only(self, names: Sequence[str]) -> RemoteFiles:
        """Return some of the files: the list of all may be long."""
        return RemoteFiles(self.address, {name: self.listed[name] for name in names})

    def open(self, names: Sequence[str]) -> Iterator[IO[bytes]]:
        """Open some of the files, in order. Their first bytes are requested together."""
        store, _ = open_store(self.address)
        yield from store.together(self._open, [(name,) for name in names])

    def _open(self, name: str) -> IO[bytes]:
        address = join_address(self.address, name)
        info = self.listed[name]._replace(key=open_store(address)[1])
        file = RemoteFile(address, info=info)
        try:
            head = file.pread(0, min(MEDIA_HEAD_BYTES, info.size))
        except (DatasetNotFoundError, ObjectChangedError):
            head = b""  # raised again, for this file alone, when it is read

        def read(start: int, stop: int) -> bytes:
            return head[start:stop] if start < len(head) else file.pread(start, stop - start)

        return io.BufferedReader(RawReader(read, info.size, file.path), REMOTE_BUFFER_BYTES)
