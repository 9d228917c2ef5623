"""Index the shards of a prepared dataset again, and leave everything else as it is."""

from __future__ import annotations

from pathlib import Path

from energon.formats.meta.info import DatasetInfo, load_info
from energon.io.address import local_path
from energon.prepare.dataset import Indexing, index_dataset, locked


def reindex_dataset(path: str | Path, indexing: Indexing) -> DatasetInfo:
    """Bring the index of a dataset up to date.

    The shards keep their numbers; those that are new in the folder are not added.

    Args:
        path: Folder of the prepared dataset.
        indexing: How to do it.

    Raises:
        DatasetNotFoundError: If it is not prepared, or a shard is missing.
        DatasetBusyError: If another process prepares it.
        FormatError: If a shard is damaged or a key is there twice.
    """
    dataset = Path(local_path(path))
    load_info(dataset)  # says what is wrong before a lock is left in a folder that is no dataset
    with locked(dataset, indexing) as held:
        return index_dataset(dataset, list(load_info(dataset).shard_counts), held)
