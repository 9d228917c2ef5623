"""Check and repair a dataset of any kind, on this machine or in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from energon.errors import ConfigError
from energon.formats.meta.info import load_info
from energon.io.address import is_remote, local_path, redact
from energon.prepare.dataset import Indexing, dataset_locked
from energon.prepare.engines import Engine
from energon.prepare.files import clear_leftovers
from energon.prepare.remote import check_writable
from energon.prepare.upkeep import Repair, Report, upkeep_of
from energon.prepare.verify.remote import RemoteCheck
from energon.prepare.verify.repair import repair_folder, write_lost
from energon.prepare.verify.shard import Depth
from energon.prepare.verify.verify import FolderCheck


def verify_dataset(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    engine: Engine | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check a prepared dataset, and return its problems. Changes nothing.

    Args:
        path: Its folder, or a file that is a dataset; a path or an address.
        depth: How much to read, see `energon.prepare.verify.shard.verify_shard`.
        engine: Where to read.
        progress: Called with the number of finished shards, and the total.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
        ConfigError: If there is no such depth, or a cluster is to read shards in a store.
        StorageError: If a store cannot be read.
    """
    address, engine = _address(path), engine or Engine()
    upkeep = upkeep_of(address)
    if upkeep is not None:
        return upkeep.verify(address, depth)
    if not is_remote(address):
        return FolderCheck(Path(address), depth, engine, progress).run()
    _refuse_cluster(address, engine)
    with RemoteCheck.opened(address, depth, engine, progress) as check:
        return check.run()


def repair_dataset(
    path: str | os.PathLike[str],
    *,
    depth: Depth = "headers",
    drop: bool = False,
    quarantine: str | Path | None = None,
    indexing: Indexing,
) -> Repair:
    """Check a dataset and rewrite what is wrong in its index. Shards are not touched.

    Args:
        path: Its folder, or a file that is a dataset; a path or an address.
        depth: How much to check, see `verify_dataset`.
        drop: Whether to remove missing, truncated or damaged shards from the dataset. For a dataset
            without shards, this only adds a note that it had no effect.
        quarantine: A file in which to list lost shards and samples, for `energon prepare
            --exclude-from`.
        indexing: How shards are indexed.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
        DatasetBusyError: If another process prepares it.
        ConfigError: If no shard would be left, the place is not writable, or a cluster is to
            read shards in a store.
        StorageError: If a store cannot be read or written.
    """
    address = _address(path)
    if is_remote(address):
        check_writable(
            address,
            "repair the dataset where it was uploaded from, or through the address of the object "
            "store",
        )
    upkeep = upkeep_of(address)
    if upkeep is not None:
        done = upkeep.repair(address, depth)
        if quarantine is not None:
            write_lost(quarantine, done.after)
        if drop:
            note = f"--drop had no effect: {redact(address)} is {upkeep.noun}, without shards"
            after = replace(done.after, notes=[*done.after.notes, note])
            done = done._replace(after=after)
        return done
    with _locked_check(address, depth, indexing) as (check, held):
        return repair_folder(check, drop=drop, quarantine=quarantine, indexing=held)


@contextmanager
def _locked_check(
    address: str, depth: Depth, indexing: Indexing
) -> Iterator[tuple[FolderCheck, Indexing]]:
    """Yield the check of a dataset that is locked meanwhile, and the settings for its repair."""
    engine, progress = indexing.engine, indexing.progress
    if is_remote(address):
        _refuse_cluster(address, engine)
        with RemoteCheck.opened(address, depth, engine, progress) as remote:
            load_info(remote.folder)
            with remote.mirror.changing():
                yield remote, indexing
        return
    dataset = Path(address)
    load_info(dataset)
    with dataset_locked(dataset, indexing) as held:
        clear_leftovers(dataset, load_info(dataset).shard_counts)
        yield FolderCheck(dataset, depth, engine, progress), held


def _address(path: str | os.PathLike[str]) -> str:
    address = os.fspath(path)
    return address if is_remote(address) else local_path(address)


def _refuse_cluster(address: str, engine: Engine) -> None:
    """Refuse a cluster for shards in a store, which this machine reads in any case."""
    if engine.name != "local":
        raise ConfigError(
            f"{redact(address)}: shards in stores are read by this machine, several at a time; "
            f"drop --engine {engine.name}"
        )
