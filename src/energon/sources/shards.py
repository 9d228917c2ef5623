"""Open shards: the file and the part table of each, within one budget for all leaves.

A file and its table are opened together, compared with what was indexed, and closed together,
so that a shard which is replaced meanwhile is never read by the table of another.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from energon.errors import EnergonError, ShardChangedError, TruncatedError
from energon.formats.part_table import PartTable
from energon.formats.part_table_file import open_part_table
from energon.formats.table_check import find_misplaced
from energon.formats.tar_index import load_tar_index, tar_index_path
from energon.io.address import is_remote
from energon.io.epath import AnyPath
from energon.io.local import OpenFile
from energon.io.range_file import RangeFile, RemoteFile
from energon.io.threads import WaitingThreads
from energon.sources.remote import check_once, open_remote_table

MAX_OPEN_SHARDS = 1024
OPEN_THREADS = 16
"""How many shards of distant stores are opened at the same time."""
PROBED_SAMPLES = 8
"""How many samples are compared with their table where the date of a shard is another."""
FAR_PROBED_SAMPLES = 2
"""The same where each takes the time of a request."""


class OpenShard(NamedTuple):
    """A shard to read from. It stays open for as long as it is held."""

    table: PartTable
    file: RangeFile


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
        self._verified: set[str] = set()
        self._probed: set[tuple[str, int]] = set()
        self._lock = Lock()
        self._threads = WaitingThreads(OPEN_THREADS, "energon-open")

    def open(self, path: str, *, num_samples: int, dataset: AnyPath) -> OpenShard:
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

    def close(self, path: str) -> None:
        """Forget an open shard, so that it is opened and checked anew."""
        with self._lock:
            self._shards.pop(path, None)

    def open_together(
        self, open_one: Callable[[int], OpenShard], shards: Sequence[int]
    ) -> list[OpenShard | None]:
        """Return what `open_one` returns for each shard, so that waiting does not add up.

        None stands for shards that cannot be opened; who reads them finds out why.
        """
        opening = [self._threads.submit(open_one, shard) for shard in shards]
        failed = [isinstance(future.exception(), EnergonError) for future in opening]
        return [
            None if bad else future.result() for future, bad in zip(opening, failed, strict=True)
        ]

    def __reduce__(self) -> tuple[type[ShardPool], tuple[int]]:
        return ShardPool, (self.max_open,)

    def _open(self, path: str, dataset: AnyPath) -> OpenShard:
        if is_remote(path):
            shard, size, mtime_ns = _open_remote(path, dataset)
        else:
            # Once is enough, since shards are opened again and again.
            shard, size, mtime_ns = _open_local(path, dataset, verify=path not in self._verified)
            self._verified.add(path)
        path = shard.file.path
        scanned = not shard.table.shard_mtime_ns
        indexed = _indexed_size(path) if scanned else shard.table.shard_size
        if size < indexed:
            raise TruncatedError(
                f"{path}: has {size} bytes, had {indexed} when it was indexed; restore the file; "
                f"`energon verify {dataset}` lists what else is lost"
            )
        if scanned:
            return shard
        if size > indexed:
            raise ShardChangedError(
                f"{path}: has {size} bytes, had {indexed} when it was indexed; {_again(dataset)}"
            )
        if mtime_ns != shard.table.shard_mtime_ns:
            self._probe(path, mtime_ns, shard, dataset)
        return shard

    def _probe(self, path: str, mtime_ns: int, shard: OpenShard, dataset: AnyPath) -> None:
        """Tell a copy, which only has another date, from a file that was written anew."""
        if (path, mtime_ns) in self._probed:
            return
        if isinstance(shard.file, RemoteFile):
            check_once(
                shard.file, shard.table, lambda: _compare(shard, FAR_PROBED_SAMPLES, dataset)
            )
        else:
            _compare(shard, PROBED_SAMPLES, dataset)
        self._probed.add((path, mtime_ns))


def default_max_open() -> int:
    """Return how many shards may be open so that most descriptors are left to the program."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_SHARDS if limit < 0 else max(1, min(MAX_OPEN_SHARDS, limit // 8))


def _open_local(path: str, dataset: AnyPath, *, verify: bool) -> tuple[OpenShard, int, int]:
    """Return an open shard, its size and modification time."""
    file = OpenFile(path)
    shard = OpenShard(file=file, table=open_part_table(path, verify=verify, dataset=dataset))
    about = os.fstat(file.descriptor)
    return shard, about.st_size, about.st_mtime_ns


def _open_remote(address: str, dataset: AnyPath) -> tuple[OpenShard, int, int]:
    file = RemoteFile(address)
    shard = OpenShard(file=file, table=open_remote_table(file, dataset))
    return shard, file.info.size, file.info.mtime_ns


def _indexed_size(path: str) -> int:
    """Return what a shard must have at least, by the index that other tools write beside it."""
    try:
        return int(load_tar_index(tar_index_path(path))[-1])
    except FileNotFoundError:
        return 0


def _compare(shard: OpenShard, count: int, dataset: AnyPath) -> None:
    """Raise ShardChangedError unless `count` samples lie where the table says."""
    table, file = shard
    index = find_misplaced(table, file.pread, count=count)
    if index is not None:
        raise ShardChangedError(
            f"{file.path}: sample {table.key_of(index)!r} does not lie at byte "
            f"{table.sample_extent(index)[0]}, as it did when the shard was indexed; the shard "
            f"was written anew; {_again(dataset)}"
        )


def _again(dataset: AnyPath) -> str:
    return f"if that is wanted, run `energon index {dataset}`, or else restore the file"
