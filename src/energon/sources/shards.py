"""Open shards: the file and the part table of each, within one budget for all leaves.

A file and its table are opened together, compared with what was indexed, and closed together,
so that a shard which is replaced meanwhile is never read by the table of another.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from energon.errors import FormatError, ShardChangedError, TruncatedError
from energon.formats.part_table import PartTable, open_part_table
from energon.formats.tar import iter_members, split_name
from energon.formats.tar_index import load_tar_index, tar_index_path
from energon.io.local import OpenFile

MAX_OPEN_SHARDS = 1024
PROBED_SAMPLES = 8
"""How many samples are compared with their table where the date of a shard is another."""
PROBE_BYTES = 64 << 10
"""What is read for the headers of a sample at a time."""


class OpenShard(NamedTuple):
    """A shard to read from. It stays open for as long as it is held."""

    table: PartTable
    file: OpenFile


class ShardPool:
    """Open shards, the least recently used of which are closed. May be used by many threads.

    The sources of a pipeline share one, so their number does not multiply what is open. A copy
    that was pickled begins empty.

    Args:
        max_open: How many shards to keep open, with two descriptors each; None for a quarter of
            what the system lets a process have.
    """

    def __init__(self, max_open: int | None = None) -> None:
        self.max_open = default_max_open() if max_open is None else max_open
        self._shards: OrderedDict[str, OpenShard] = OrderedDict()
        self._probed: set[tuple[str, int]] = set()
        self._lock = Lock()

    def open(self, path: str, *, num_samples: int, dataset: Path) -> OpenShard:
        """Return an open shard.

        Args:
            path: The shard.
            num_samples: How many samples it had when it was indexed.
            dataset: Which dataset to prepare again, for messages.

        Raises:
            DatasetNotFoundError: If there is no such file.
            TruncatedError: If its end is missing.
            ShardChangedError: If it is not the one that was indexed.
        """
        with self._lock:
            shard = self._shards.get(path)
            if shard is not None:
                self._shards.move_to_end(path)
        if shard is None:
            shard = self._open(path, dataset)
            with self._lock:
                self._shards[path] = shard
                if len(self._shards) > self.max_open:
                    # Whoever reads from it still holds it; it is closed after that.
                    self._shards.popitem(last=False)
        table = shard.table
        if table.num_samples != num_samples:
            raise ShardChangedError(
                f"{path}: has {table.num_samples} samples in {table.shard_size} bytes, had "
                f"{num_samples} samples when it was indexed; {_again(dataset)}"
            )
        return shard

    def __reduce__(self) -> tuple[type[ShardPool], tuple[int]]:
        return ShardPool, (self.max_open,)

    def _open(self, path: str, dataset: Path) -> OpenShard:
        shard = OpenShard(file=OpenFile(path), table=open_part_table(path))
        about = os.fstat(shard.file.descriptor)
        scanned = not shard.table.shard_mtime_ns
        indexed = _indexed_size(path) if scanned else shard.table.shard_size
        if about.st_size < indexed:
            raise TruncatedError(
                f"{path}: has {about.st_size} bytes, had {indexed} when it was indexed; restore "
                f"the file, or {_again(dataset)}"
            )
        if scanned:
            return shard
        if about.st_size > indexed:
            raise ShardChangedError(
                f"{path}: has {about.st_size} bytes, had {indexed} when it was indexed; "
                f"{_again(dataset)}"
            )
        if about.st_mtime_ns != shard.table.shard_mtime_ns:
            self._probe(path, about.st_mtime_ns, shard, dataset)
        return shard

    def _probe(self, path: str, mtime_ns: int, shard: OpenShard, dataset: Path) -> None:
        """Tell a copy, which only has another date, from a file that was written anew."""
        if (path, mtime_ns) in self._probed:
            return
        last = shard.table.num_samples - 1
        for index in np.unique(np.linspace(0, last, PROBED_SAMPLES).astype(np.int64)).tolist():
            if not _is_where_indexed(shard, index):
                (key,) = shard.table.keys(np.array([index]))
                raise ShardChangedError(
                    f"{path}: sample {key!r} does not lie at byte "
                    f"{shard.table.sample_offset[index]}, as it did when the shard was indexed; "
                    f"the shard was written anew, {_again(dataset)}"
                )
        self._probed.add((path, mtime_ns))


def default_max_open() -> int:
    """Return how many shards may be open so that most descriptors are left to the program."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_SHARDS if limit < 0 else max(1, min(MAX_OPEN_SHARDS, limit // 8))


def _indexed_size(path: str) -> int:
    """Return what a shard must have at least, by the index that other tools write beside it."""
    try:
        return int(load_tar_index(tar_index_path(path))[-1])
    except FileNotFoundError:
        return 0


def _is_where_indexed(shard: OpenShard, index: int) -> bool:
    """Return whether the headers of a sample say what the table says."""
    table, file = shard
    begin, end = table.sample_offset[index : index + 2].tolist()
    first, last = table.first_part[index : index + 2].tolist()
    (key,) = table.keys(np.array([index]))
    names = [table.part_names[name] for name in table.part_name[first:last].tolist()]
    offsets = (table.part_offset[first:last].astype(np.int64) - begin).tolist()
    sizes = table.part_size[first:last].tolist()

    def read(offset: int, count: int) -> bytes:
        return file.pread(begin + offset, min(count, PROBE_BYTES, end - begin - offset))

    try:
        members = list(iter_members(read, end - begin, origin=file.path, strict=False))
    except FormatError:
        return False
    found = [
        (split_name(member.name), member.offset, member.size)
        for member in members
        if split_name(member.name) is not None
    ]
    return found == list(zip([(key, name) for name in names], offsets, sizes, strict=True))


def _again(dataset: Path) -> str:
    return f"run `energon prepare {dataset}` again"
