"""Open auxiliary data by its address in a metadataset: files of datasets, or of folders.

Folders hold no samples, but files by their paths below the folder.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from energon.errors import ConfigError, DatasetNotFoundError, NoSuchFileError, StorageError
from energon.formats.media import MediaMetadata
from energon.formats.meta.info import META
from energon.io.address import is_remote, redact
from energon.io.epath import EPath, any_path, open_file
from energon.io.files import has_files, list_files, open_store, read_bytes
from energon.metadataset.document import Problems
from energon.metadataset.kind import dataset_kind
from energon.samples.provenance import SourceInfo
from energon.sources.files.locate import MediaLookup
from energon.sources.files.store import FileStore, StoreFile
from energon.sources.kinds import DatasetKind, kind_named
from energon.sources.part_statistics import PartStatistics, SizeStatistics, media_statistics
from energon.sources.shards import ShardPool

if TYPE_CHECKING:
    from energon.sources.tree import BrowsedFolder

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class SystemFileStore(FileStore[bytes]):
    """The files of a folder, by their paths below it.

    Args:
        base_dir: The folder, here or in an object store. Names that would leave it are refused.
            None accepts absolute paths and URLs as names.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If it is remote and cannot be reached.

    Example:
        >>> store = SystemFileStore("photos")
        >>> "shard-0.tar" in store, store.get_size("shard-0.tar")
        (True, 21504)
        >>> store.get("../x")
        Traceback (most recent call last):
            ...
        energon.errors.NoSuchFileError: '../x' leaves the folder photos; expected a path below it
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None = None) -> None:
        self.base_dir = None if base_dir is None else any_path(base_dir)
        self._media = None if self.base_dir is None else MediaLookup(self.base_dir)
        if isinstance(self.base_dir, Path) and not self.base_dir.is_dir():
            raise DatasetNotFoundError(
                f"{self.base_dir}: no such folder; expected the one with the files of samples"
            )
        if isinstance(self.base_dir, EPath) and not self._is_listed(self.base_dir):
            raise DatasetNotFoundError(
                f"{self.base_dir}: contains no files; expected those that samples refer to"
            )

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        path = self._path(name)
        try:
            return read_bytes(path), self._source(name)
        except _MISSING as error:
            raise self._missing(name) from error

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        if not isinstance(self.base_dir, EPath):
            return super().get_many_raw(names)
        arguments = [(name,) for name in names]
        store, _ = open_store(self.base_dir)
        return store.together(self.get_raw, arguments)

    def open(self, name: str) -> IO[bytes]:
        path = self._path(name)
        try:
            file = cast(io.BufferedReader, open_file(path))
        except _MISSING as error:
            raise self._missing(name) from error
        return StoreFile(file, self, name, is_remote=isinstance(path, EPath))

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return super().get_media_metadata(key) if self._media is None else self._media.get(key)

    def get_path(self) -> str:
        return "" if self.base_dir is None else str(self.base_dir)

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def _source(self, name: str) -> SourceInfo:
        return SourceInfo(self.get_path(), name, None, (name,))

    def _missing(self, name: str) -> NoSuchFileError:
        return NoSuchFileError(f"{self._path(name)}: no such file, but a sample refers to {name!r}")

    def _path(self, name: str) -> Path | EPath:
        if self.base_dir is None:
            if not os.path.isabs(name) and not is_remote(name):
                raise NoSuchFileError(
                    f"{name!r} is not an absolute path, and this store has no folder; set one "
                    "with SystemFileStore(base_dir)"
                )
            return any_path(name)
        # Names come from data, and must not reach what was never meant to be read.
        relative = os.path.normpath(name)
        leaves = relative == ".." or relative.startswith(".." + os.sep)
        if leaves or os.path.isabs(name) or "://" in name:
            raise NoSuchFileError(
                f"{redact(name)!r} leaves the folder {self.base_dir}; expected a path below it"
            )
        return self.base_dir / relative

    @staticmethod
    def _is_listed(folder: EPath) -> bool:
        """Return whether there are files; web servers cannot tell."""
        try:
            return has_files(folder)
        except StorageError:
            return True


def describe_folder(folder: str, parts: bool) -> dict[str, Any]:
    """Return how many files there are, how large they are, and what is recorded about media.

    Args:
        folder: The folder.
        parts: Whether to list them.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If it cannot be listed.
    """
    SystemFileStore(folder)
    description: dict[str, Any] = {"media": media_statistics(any_path(folder)) or {}}
    if not parts:
        return description
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for file in list_files(folder):
        if not file.key.startswith(f"{META}/"):
            extension = os.path.splitext(file.key)[1].removeprefix(".").lower()
            sizes[extension or "none"].append(file.size)
    statistics = PartStatistics()
    for extension, own in sizes.items():
        statistics.parts[extension] = SizeStatistics()
        statistics.parts[extension].add(np.array(own))
        statistics.samples.add(np.array(own))
    counts = statistics.to_json()
    return {
        "files": statistics.samples.count,
        "bytes": statistics.samples.total,
        "file_sizes": counts["sample_sizes"],
        "extensions": counts["parts"],
        **description,
    }


class FolderKind(DatasetKind):
    """Folders whose media files are recorded in an index."""

    name = "filesystem"
    noun = "a folder of files"
    has_files = True
    prepares = False

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        return SystemFileStore(address)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        raise ConfigError(f"{redact(address)} is a folder already and needs no mounting")

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        return describe_folder(address, parts)


KIND = FolderKind()


FOLDER_SCHEME = "filesystem://"
REMOTE_FOLDER_SCHEME = "filesystem+"
"""Precedes a URL: `filesystem+s3://bucket/images`."""


def open_file_store(
    address: str | os.PathLike[str],
    *,
    pool: ShardPool | None = None,
    allow: Collection[str] = (),
) -> FileStore[bytes]:
    """Return the files at an address.

    Args:
        address: Folder of a prepared dataset, here or in an object store; `filesystem://` and any
            folder, or `filesystem+` and the URL of one.
        pool: Opens shards; None makes a pool for this store.
        allow: What the data may do, see `get_train_dataset`.

    Raises:
        DatasetNotFoundError: If there is no dataset or folder at the address.
        ConfigError: If it has no files that can be read by name.
        SecurityError: If it needs something that is not allowed.

    Example:
        >>> store = open_file_store("photos")
        >>> store.get("3.txt"), store.get_size("3.png") > 0
        (b'grey number 3', True)
    """
    address = os.fspath(address)
    folder = folder_of(address)
    if folder is not None:
        return SystemFileStore(folder)
    kind = dataset_kind(address)
    if kind == "metadataset":
        raise ConfigError(
            f"{redact(address)}: a {kind} has no files that can be read by name; expected "
            f"a prepared dataset, or a folder as {FOLDER_SCHEME}FOLDER"
        )
    return kind_named(kind, address).file_store(address, pool=pool, allow=allow)


def folder_of(address: str) -> str | None:
    """Return the folder that an address of auxiliary data refers to; None if it is a dataset."""
    for prefix in (FOLDER_SCHEME, REMOTE_FOLDER_SCHEME):
        if address.startswith(prefix):
            return address.removeprefix(prefix)
    return None


def open_aux(
    aux: Mapping[str, str],
    *,
    origin: str,
    pool: ShardPool | None = None,
    allow: Collection[str] = (),
) -> dict[str, FileStore[bytes]]:
    """Return the stores of a leaf by the names that cookers use.

    Raises:
        EnergonError: Like `open_file_store`, for all stores that cannot be opened, with their place
            in the metadataset.
    """
    stores: dict[str, FileStore[bytes]] = {}
    problems = Problems()
    for name, address in aux.items():
        with problems.kept(f"{origin}: aux {name!r}"):
            stores[name] = open_file_store(address, pool=pool, allow=allow)
    problems.raise_all()
    return stores
