"""Open shards, within one budget for all leaves, and read spans of them with few calls.

A file and its table are opened together, compared with what was indexed, and closed together,
so that a shard which is replaced in the meantime is never read by the table of another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import numpy as np

from energon.arrays import Ints
from energon.errors import DatasetNotFoundError, EnergonError, ShardChangedError, TruncatedError
from energon.formats.tables.part_table import (
    TABLE_SUFFIX,
    PartTable,
    find_misplaced,
    open_part_table,
    warn_of_other_version,
)
from energon.formats.tables.part_table_bytes import has_other_version
from energon.formats.tar.scan import load_tar_index, parse_tar_index, scan_archive, tar_index_path
from energon.io.address import address_name, is_remote, join_address, parent_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile
from energon.io.epath import AnyPath
from energon.io.files import file_infos, read_bytes
from energon.io.range_file import RangeFile, RemoteFile, SkippingReader
from energon.io.threads import WaitingThreads, fork_safe_lock
from energon.limits import TAR_PART_BYTES
from energon.messages import shell_word


def open_remote_table(file: RemoteFile, dataset: object) -> PartTable:
    """Return the part table of a shard: the one next to it, or one made by reading its headers.

    It is fetched or made once per machine for each version of the shard.

    Args:
        file: The shard.
        dataset: The dataset that it belongs to, for warnings.

    Raises:
        TruncatedError: If the shard is shorter than it was when it was indexed.
        FormatError: If the table or the shard is damaged.
    """
    beside = _beside(file, TABLE_SUFFIX)

    def fetch() -> bytes:
        try:
            content = read_bytes(beside)
        except DatasetNotFoundError:
            return _scan(file).to_bytes()
        if has_other_version(content):
            warn_of_other_version(dataset)
            return _scan(file).to_bytes()
        return content

    name = redact(beside)

    def parse(data: Any) -> PartTable:
        return PartTable.from_buffer(data, origin=name, verify=True)

    from energon.io.disk_cache import disk_cache  # for remote shards only

    return disk_cache().load(name, _version(file), fetch, parse)


def check_once(file: RemoteFile, table: PartTable, check: Callable[[], None]) -> None:
    """Call `check`, unless it has succeeded before on this machine for this shard and table."""

    def make() -> bytes:
        check()
        return b"as indexed"

    from energon.io.disk_cache import disk_cache

    version = f"{_version(file)} {table.shard_size} {table.shard_mtime_ns} {table.num_parts}"
    disk_cache().keep(f"check of {file.path}", version, make)


def _scan(file: RemoteFile) -> PartTable:
    """Return a table made from the headers of a shard, and check it against the existing index."""
    try:
        index = _beside(file, ".idx")
        indexed = int(parse_tar_index(read_bytes(index), origin=redact(index))[-1])
    except DatasetNotFoundError:
        indexed = 0
    if file.info.size < indexed:
        raise TruncatedError(
            f"{file.path}: has {file.info.size} bytes, had {indexed} when it was indexed; restore "
            "the file, or run `energon prepare` again"
        )
    reader = SkippingReader(file.object)
    scan = scan_archive(reader.read_into, file.info.size, origin=file.path, strict=False)
    return PartTable.from_scan(scan, shard_mtime_ns=file.info.mtime_ns)


def _beside(file: RemoteFile, ending: str) -> str:
    return join_address(parent_address(file.address), address_name(file.address) + ending)


def _version(file: RemoteFile) -> str:
    return f"{file.info.version} {file.info.size}"


MAX_OPEN_SHARDS = 1024
OPEN_THREADS = 16
"""How many shards of remote stores are opened at the same time."""
COMPARED_SAMPLES = 8
"""How many samples are compared with their table if the date of a shard has changed."""
FAR_PROBED_SAMPLES = 2
"""How many are compared if each comparison takes the time of a request."""


class OpenShard(NamedTuple):
    """A shard to read from. It stays open as long as it is held."""

    table: PartTable
    file: RangeFile
    max_part_bytes: int
    """The limit of this process for parts of shards, looked up once per shard."""
    mtime_ns: int
    """When it was last changed before it was opened."""


class ShardPool:
    """Open shards, of which the least recently used are closed. May be used by many threads.

    The sources of a pipeline share one, so their number does not multiply the number of open files.
    A pickled copy begins empty.

    Args:
        max_open: How many shards to keep, with their tables. Their files are closed earlier where
            the process may not open as many, see `OpenFile`.
    """

    def __init__(self, max_open: int = MAX_OPEN_SHARDS) -> None:
        self.max_open = max_open
        self._shards: OrderedDict[str, OpenShard] = OrderedDict()
        # When local shards were last changed before this process first opened them.
        self._dates: dict[str, int] = {}
        self._probed: set[tuple[str, int]] = set()
        # What stores have said of shards that are not open yet.
        self._infos: dict[str, ObjectInfo] = {}
        self._lock = fork_safe_lock()
        self._threads = WaitingThreads(OPEN_THREADS, "energon-open")

    def open(self, path: str, *, num_samples: int, dataset: AnyPath) -> OpenShard:
        """Return an open shard.

        Args:
            path: The shard.
            num_samples: How many samples it had when it was indexed.
            dataset: The dataset to prepare again, for messages.

        Raises:
            DatasetNotFoundError: If there is no such file.
            TruncatedError: If its end is missing.
            ShardChangedError: If it is not the shard that was indexed.
        """
        with self._lock:
            shard = self._shards.get(path)
            if shard is not None:
                self._shards.move_to_end(path)
        if shard is not None and isinstance(shard.file, OpenFile):
            # A shard of which nothing moves when it is rewritten would yield other contents under
            # the old keys. Asking takes a microsecond, for a block of samples.
            self._check_date(path, shard.file.stat().st_mtime_ns, dataset)
        if shard is None:
            shard = self._open(path, dataset)
            with self._lock:
                self._shards[path] = shard
                if len(self._shards) > self.max_open:
                    # Anyone still reading from it holds it; it is closed after that.
                    self._shards.popitem(last=False)
        table = shard.table
        if table.num_samples != num_samples:
            raise ShardChangedError(
                f"{path}: has {table.num_samples} samples in {table.shard_size} bytes, had "
                f"{num_samples} samples when it was indexed; {_again(dataset)}"
            )
        return shard

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Return the sizes of shards; those in stores are then opened without asking again.

        Raises:
            DatasetNotFoundError: If one is missing.
        """
        infos = file_infos(paths)
        self._infos |= {
            path: info for path, info in zip(paths, infos, strict=True) if is_remote(path)
        }
        return [info.size for info in infos]

    def close(self, path: str) -> None:
        """Drop an open shard, so that it is opened and checked again."""
        with self._lock:
            self._shards.pop(path, None)

    def open_together(
        self, open_one: Callable[[int], OpenShard], shards: Sequence[int]
    ) -> list[OpenShard | None]:
        """Open shards in parallel, so that waiting does not add up; see `open_one`.

        None stands for shards that cannot be opened; reading from them reports why.
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
            shard, size = _open_remote(path, dataset, self._infos.pop(path, None))
        else:
            # Once is enough, since shards are opened again and again.
            shard, size = _open_local(path, dataset, verify=path not in self._dates)
            self._check_date(path, shard.mtime_ns, dataset)
        path, mtime_ns = shard.file.path, shard.mtime_ns
        scanned = not shard.table.shard_mtime_ns
        indexed = _indexed_size(path) if scanned else shard.table.shard_size
        if size < indexed:
            raise TruncatedError(
                f"{path}: has {size} bytes, had {indexed} when it was indexed; restore the file; "
                f"`energon verify {shell_word(dataset)}` lists what else is lost"
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

    def _check_date(self, path: str, mtime_ns: int, dataset: AnyPath) -> None:
        """Raise ShardChangedError if a local shard was changed since it was first opened here."""
        if self._dates.setdefault(path, mtime_ns) != mtime_ns:
            raise ShardChangedError(
                f"{path}: was changed at {_time(mtime_ns)}, after this run had begun to read it as "
                f"of {_time(self._dates[path])}; {_again(dataset)}, and resume from a saved state"
            )

    def _probe(self, path: str, mtime_ns: int, shard: OpenShard, dataset: AnyPath) -> None:
        """Distinguish a copy, which only has another date, from a rewritten file."""
        if (path, mtime_ns) in self._probed:
            return
        if isinstance(shard.file, RemoteFile):
            check_once(
                shard.file, shard.table, lambda: _compare(shard, FAR_PROBED_SAMPLES, dataset)
            )
        else:
            _compare(shard, COMPARED_SAMPLES, dataset)
        self._probed.add((path, mtime_ns))


def _open_local(path: str, dataset: AnyPath, *, verify: bool) -> tuple[OpenShard, int]:
    """Return an open shard, and its size."""
    file = OpenFile(path)
    status = file.stat()
    table = open_part_table(path, verify=verify, dataset=dataset)
    return OpenShard(table, file, TAR_PART_BYTES.value, status.st_mtime_ns), status.st_size


def _open_remote(address: str, dataset: AnyPath, info: ObjectInfo | None) -> tuple[OpenShard, int]:
    file = RemoteFile(address, info=info)
    table = open_remote_table(file, dataset)
    return OpenShard(table, file, TAR_PART_BYTES.value, file.info.mtime_ns), file.info.size


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9).isoformat(" ")


def _indexed_size(path: str) -> int:
    """Return the minimum size of a shard, according to another tool's index next to it."""
    try:
        return int(load_tar_index(tar_index_path(path))[-1])
    except FileNotFoundError:
        return 0


def _compare(shard: OpenShard, count: int, dataset: AnyPath) -> None:
    """Raise ShardChangedError unless `count` samples are where the table says."""
    table, file = shard.table, shard.file
    index = find_misplaced(table, file.pread, count=count)
    if index is not None:
        raise ShardChangedError(
            f"{file.path}: sample {table.key_of(index)!r} is no longer at byte "
            f"{table.sample_extent(index)[0]}, as it did when the shard was indexed; the shard "
            f"was rewritten; {_again(dataset)}"
        )


def _again(dataset: AnyPath) -> str:
    return (
        f"if the change is intended, run `energon index {shell_word(dataset)}`, otherwise restore "
        "the file"
    )


SKIPPED_GAP_BYTES = 16 << 10
"""Bytes between two samples that are read along rather than skipped."""
MAX_SPAN_BYTES = 4 << 20
"""Maximum size of one read in bytes."""
LOCAL_SPAN_BYTES = 512 << 10
"""The limit for local files. Cutting samples of 12 small parts out of spans that fit into the cache
of a core takes 6.5 µs a sample, out of spans of 4 MiB 9 µs."""
SMALL_PART_BYTES = 4 << 10
"""Up to this size, parts next to each other are read together: a call costs more than a copy."""
Files = Sequence[tuple[RangeFile, int]]
"""Files, each with how many consecutive samples or ranges are in it."""


def read_spans(file: RangeFile, low: Ints, high: Ints) -> tuple[list[bytes], Ints]:
    """Read samples of a file at `low` to `high`, ascending, with few calls.

    Returns:
        The buffer that each sample is in, and the position in the file where the buffer begins.
    """
    buffers, begin = lazy_spans([(file, len(low))], low, high)
    return list(buffers), begin


def lazy_spans(files: Files, low: Ints, high: Ints) -> tuple[Iterator[bytes], Ints]:
    """Read samples of some files, local ones only as buffers are taken.

    What is cut out of a buffer right after it was read is still in the cache of the processor.
    Requests to a store are made at once, since they wait for each other.
    """
    max_span = MAX_SPAN_BYTES if files[0][0].is_remote else LOCAL_SPAN_BYTES
    firsts = list(accumulate((count for _, count in files), initial=0))
    edges = span_edges(low, high, max_span=max_span, firsts=firsts[1:-1])
    begin = low[edges]
    size = np.maximum.reduceat(high, edges) - begin
    counts = np.diff(np.searchsorted(edges, firsts)).tolist()
    own = [(file, count) for (file, _), count in zip(files, counts, strict=True)]
    spans = _ranges(own, begin.tolist(), size.tolist(), lazily=not files[0][0].is_remote)
    if len(edges) == len(low):
        return spans, low
    counts = np.diff(edges, append=len(low))
    return chain.from_iterable(map(repeat, spans, counts.tolist())), np.repeat(begin, counts)


def _ranges(files: Files, starts: list[int], sizes: list[int], lazily: bool) -> Iterator[bytes]:
    """Return ranges of files, read at once or as they are taken."""
    ranges: list[Iterable[bytes]] = []
    stop = 0
    for file, count in files:
        start, stop = stop, stop + count
        own = starts[start:stop], sizes[start:stop]
        ranges.append(map(file.pread, *own) if lazily else file.pread_many(*own))
    return chain.from_iterable(ranges)


def span_edges(
    low: Ints,
    high: Ints,
    *,
    max_gap: int = SKIPPED_GAP_BYTES,
    max_span: int = MAX_SPAN_BYTES,
    firsts: Sequence[int] = (),
) -> Ints:
    """Return which samples at `low` to `high`, ascending, start a call; those at `firsts` do."""
    cut = (low[1:] - high[:-1] > max_gap) | (low[1:] // max_span != low[:-1] // max_span)
    cut[[first - 1 for first in firsts]] = True
    return np.concatenate(([0], np.flatnonzero(cut) + 1))


def read_columns(files: Files, starts: Ints, sizes: Ints) -> list[Sequence[bytes]]:
    """Return the parts of samples with large parts, a column per part.

    Small parts that lie side by side, such as a caption and metadata, take one call a sample. Which
    ones do is decided by the first sample, since the others are like it. `starts` and `sizes` have
    the shape (parts, samples).
    """
    if not starts.size:
        return [()] * len(starts)
    runs = list(_runs_of_small_parts(starts[:, 0].tolist(), sizes[:, 0].tolist()))
    firsts, stops = [first for first, _ in runs], starts + sizes
    low = np.minimum.reduceat(starts, firsts)
    length = np.maximum.reduceat(stops, firsts) - low
    # Sample by sample, in the order in which they are in the file.
    own = [(file, count * len(runs)) for file, count in files]
    ranges = low.T.ravel().tolist(), length.T.ravel().tolist()
    contents = list(_ranges(own, *ranges, lazily=False))
    columns: list[Sequence[bytes]] = []
    for number, (first, stop) in enumerate(runs):
        read = contents[number :: len(runs)]
        if stop - first == 1:
            columns.append(read)
            continue
        edges = zip(starts[first:stop] - low[number], stops[first:stop] - low[number], strict=True)
        columns += [
            [run[a:b] for run, a, b in zip(read, begins.tolist(), ends.tolist(), strict=True)]
            for begins, ends in edges
        ]
    return columns


def _runs_of_small_parts(starts: list[int], sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts to be read together: the first of them, and the one after the last.

    Example:
        >>> list(_runs_of_small_parts([0, 90_112, 91_136], [90_000, 40, 300]))
        [(0, 1), (1, 3)]
    """
    first = 0
    for part in range(1, len(starts) + 1):
        if part < len(starts):
            gap = starts[part] - starts[part - 1] - sizes[part - 1]
            if max(sizes[part - 1 : part + 1]) <= SMALL_PART_BYTES and 0 <= gap < SMALL_PART_BYTES:
                continue
        yield first, part
        first = part
