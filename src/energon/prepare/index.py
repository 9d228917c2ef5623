"""Index shards: find their samples and write what readers need, shard by shard."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.part_table import PartTable, part_table_path
from energon.formats.tar_index import encode_tar_index, load_tar_index, tar_index_path
from energon.formats.tar_scan import scan_tar
from energon.io.atomic import write_atomic

COMPRESSED = (".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
MIN_PARALLEL_BYTES = 64 << 20
"""Smaller datasets are indexed before another process has started."""


def find_shards(dataset: Path) -> list[str]:
    """Return the paths of all shards below a folder, relative to it, sorted.

    Raises:
        DatasetNotFoundError: If there is no such folder, or no shard in it.
        ConfigError: If shards are compressed.
    """
    if not dataset.is_dir():
        raise DatasetNotFoundError(f"{dataset}: no such folder; wanted is one with tar files in it")
    found, compressed = [], []
    for folder, folders, files in os.walk(dataset, followlinks=True):
        folders[:] = sorted(name for name in folders if name != ".nv-meta")
        for name in files:
            path = os.path.relpath(os.path.join(folder, name), dataset)
            if name.endswith(COMPRESSED):
                compressed.append(path)
            elif name.endswith(".tar"):
                found.append(path)
    if compressed:
        raise ConfigError(
            f"{dataset}: {len(compressed)} shards are compressed, e.g. {compressed[0]}; samples of "
            "these cannot be read one by one. Unpack them, e.g. with `gunzip -S .tgz` or "
            "`zstd -d`, and name them .tar"
        )
    if not found:
        raise DatasetNotFoundError(
            f"{dataset}: there is no .tar file in this folder or below; write shards first, e.g. "
            "with webdataset's ShardWriter"
        )
    return sorted(found)


def index_shard(path: str) -> PartTable:
    """Return the part table of a shard, and write it and the `.tar.idx` if they are not there.

    A shard whose size and modification time are those of its table is not scanned again.

    Raises:
        FormatError: If the shard is damaged, cut off or has no samples.
    """
    about = os.stat(path)
    try:
        table = PartTable.open(part_table_path(path))
        index = load_tar_index(tar_index_path(path))
        known = (table.shard_size, table.shard_mtime_ns) == (about.st_size, about.st_mtime_ns)
        if known and (index == table.sample_offset).all():
            return table
    except (FileNotFoundError, FormatError, ValueError):
        pass
    scan = scan_tar(path)
    if not scan.num_samples:
        raise FormatError(
            f"{path}: has no samples. Files in a shard are named KEY.EXTENSION, and links and "
            "folders do not count; remove the shard, or leave it out with --exclude"
        )
    table = PartTable.from_scan(scan, shard_mtime_ns=about.st_mtime_ns)
    write_atomic(tar_index_path(path), encode_tar_index(scan.sample_offset))
    write_atomic(part_table_path(path), table.to_bytes())
    return table


def index_shards(
    dataset: Path,
    shards: Sequence[str],
    *,
    num_workers: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Index all shards, in processes where that pays.

    Args:
        dataset: Folder of the dataset.
        shards: Paths below it.
        num_workers: How many processes at most.
        progress: Called after each shard.

    Raises:
        FormatError: If a shard is damaged.
    """
    paths = [str(dataset / shard) for shard in shards]
    with _mapping(paths, num_workers) as mapped:
        for _ in mapped:
            progress()


def _index(path: str) -> None:
    index_shard(path)


@contextmanager
def _mapping(paths: list[str], num_workers: int) -> Iterator[Iterator[None]]:
    total = sum(os.path.getsize(path) for path in paths)
    workers = min(num_workers, len(paths), os.cpu_count() or 1)
    if workers < 2 or total < MIN_PARALLEL_BYTES:
        yield map(_index, paths)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["energon.prepare.index"])
    chunk = max(1, len(paths) // (8 * workers))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            yield pool.map(_index, paths, chunksize=chunk)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
