"""Folders of files: not samples, but auxiliary data by name."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from energon.errors import ConfigError
from energon.formats.meta.info import META
from energon.io.address import redact
from energon.io.epath import any_path
from energon.io.files import list_files
from energon.sources.files.folder import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.kinds import DatasetKind
from energon.sources.part_statistics import PartStatistics, SizeStatistics, media_statistics
from energon.sources.shards import ShardPool

if TYPE_CHECKING:
    from energon.sources.browse.tree import BrowsedFolder


def describe_folder(folder: str, parts: bool) -> dict[str, Any]:
    """Return how many files there are, how large they are, and what is noted about media.

    Args:
        folder: Where they are.
        parts: Whether to list them.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If it cannot be listed.
    """
    SystemFileStore(folder)
    about: dict[str, Any] = {"media": media_statistics(any_path(folder)) or {}}
    if not parts:
        return about
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for found in list_files(folder):
        if not found.key.startswith(f"{META}/"):
            extension = os.path.splitext(found.key)[1].removeprefix(".").lower()
            sizes[extension or "none"].append(found.size)
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
        **about,
    }


class FolderKind(DatasetKind):
    """Folders whose media files have been noted in an index."""

    name = "filesystem"
    noun = "a folder of files"
    has_files = True

    def file_store(self, address: str, *, pool: ShardPool | None = None) -> FileStore[bytes]:
        return SystemFileStore(address)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        raise ConfigError(f"{redact(address)} is a folder already; there is nothing to show")

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        return describe_folder(address, parts)


KIND = FolderKind()
