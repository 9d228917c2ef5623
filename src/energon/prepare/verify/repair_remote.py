"""Rewrite what is missing, damaged or out of date in the index of a dataset in a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from energon.formats.meta.info import load_info
from energon.formats.tables.part_table_file import part_table_path
from energon.prepare.dataset import Indexing
from energon.prepare.index.index import IndexOptions
from energon.prepare.mirror import check_writable
from energon.prepare.upkeep import upkeep_of
from energon.prepare.verify.remote import RemoteCheck
from energon.prepare.verify.repair import repair_at
from energon.prepare.verify.report import Repair, Report
from energon.prepare.verify.shard import Depth


def repair_remote(
    address: str,
    *,
    depth: Depth = "headers",
    drop: bool = False,
    quarantine: str | Path | None = None,
    indexing: Indexing,
) -> Repair:
    """Check a dataset in a store and repair its index, see `repair_dataset`.

    Shards are read once: what the check has found in them becomes their index. The index of
    each shard is uploaded at once, the files of `.nv-meta` at the end, each as a whole.

    Args:
        address: Its folder, or a file that is a dataset.
        depth: How much to check.
        drop: Whether to take shards out of the dataset that are missing, cut off or damaged.
        quarantine: A file to list the shards and samples in that are lost.
        indexing: How shards are indexed.

    Raises:
        DatasetNotFoundError: If it is not a prepared dataset.
        ConfigError: If no shard would be left, or the place cannot be written to.
        StorageError: If the store cannot be read or written.
    """
    check_writable(
        address,
        "repair the dataset where it was uploaded from, or by the address of the object store",
    )
    upkeep = upkeep_of(address)
    if upkeep is not None:
        return upkeep.repair(address, depth)
    workers = indexing.engine.num_workers
    with RemoteCheck.opened(address, depth, workers, indexing.progress) as check:
        load_info(check.mirror.folder)
        place = _InStore(check, indexing)
        with check.mirror.changing():
            return repair_at(place, drop=drop, quarantine=quarantine, indexing=indexing)


class _InStore:
    """A dataset in a store.

    Args:
        check: Compares it with its index.
        indexing: How shards are indexed.
    """

    def __init__(self, check: RemoteCheck, indexing: Indexing) -> None:
        self.folder = check.mirror.folder
        self._check = check
        self._options = IndexOptions(indexing.checksum)

    def verify(self) -> Report:
        return self._check.run()

    def index_some(self, stale: Sequence[str]) -> None:
        self._index(stale, stale)

    def before_all(self, stale: Sequence[str], shards: Sequence[str]) -> None:
        self._index(stale, shards)

    def _index(self, stale: Sequence[str], shards: Sequence[str]) -> None:
        """Have an index of all `shards`, of those that are `stale` a new one."""
        mirror = self._check.mirror
        for name in stale:
            found = None if self._options.checksum else self._check.found(name)
            if found is not None:
                mirror.save_index(found[0], name, found[1])
            else:
                part_table_path(mirror.folder / name).unlink(missing_ok=True)
        mirror.index(shards, self._options)
        self._check.indexed_anew(stale, shards)
