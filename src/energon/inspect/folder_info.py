"""Describe a folder of files, as plain data."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import numpy as np

from energon.formats.info import META
from energon.inspect.media_statistics import media_statistics
from energon.inspect.part_statistics import PartStatistics, SizeStatistics
from energon.io.epath import any_path
from energon.io.files import list_files
from energon.sources.file_store_folder import SystemFileStore


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
