"""Index the shards of a folder: find their samples, and write what readers need next to each.

`index.sqlite` is left, extended or rewritten. It is replaced together with the dataset, so that
both are always either old or new.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    FormatError,
    TruncatedError,
)
from energon.formats.meta.info import META, DatasetInfo, load_info
from energon.formats.meta.yaml import dump_yaml
from energon.formats.tables.part_table import (
    PartTable,
    RepeatedPart,
    find_misplaced,
    part_table_path,
)
from energon.formats.tables.sqlite_file import SqliteReader, writing_file
from energon.formats.tables.sqlite_index import (
    ShardState,
    ShardToIndex,
    copy_media,
    extend_sqlite_index,
    indexed_shards,
    write_sqlite_index,
)
from energon.formats.tar.scan import (
    ReadInto,
    TarScan,
    encode_tar_index,
    load_tar_index,
    scan_archive,
    tar_index_path,
)
from energon.io.atomic import publish, write_atomic
from energon.io.range_file import RemoteFile, SkippingReader, range_file
from energon.messages import counted
from energon.metadataset.kind import advice
from energon.prepare.engines import Engine, Progress, no_progress, run_batches
from energon.prepare.files import (
    FileState,
    commit_files,
    file_state,
    flush_files,
    list_dataset_files,
    reporting,
    stage_files,
    write_files,
)

logger = logging.getLogger("energon")
A = TypeVar("A")
T = TypeVar("T")

CHECKED_PIECE_BYTES = 1 << 20
MAX_PENDING_BYTES = 16 << 20
"""Index files that are written together."""


class IndexedShard(NamedTuple):
    """What preparing a dataset needs to know about a shard."""

    name: str
    """Its path below the dataset folder."""
    num_samples: int
    state: FileState
    first_key: bytes
    """The lowest key; those of all samples are between it and the last."""
    last_key: bytes
    duplicate: str | None
    """A key that occurs twice in the shard."""
    repeated: RepeatedPart | None
    """A part that occurs twice in a sample of the shard."""
    was_read: bool
    """Whether it is new or changed, so that it was read now."""
    part_names: tuple[str, ...] = ()
    """The parts of its samples, unordered."""


class RangeSums:
    """The CRC-32 of ranges of a file that is read in ascending order.

    Args:
        offsets: Where the ranges begin, ascending.
        sizes: How long they are.
        read_into: Reads the file.
        origin: Its name in messages.
    """

    def __init__(
        self, offsets: NDArray[Any], sizes: NDArray[Any], read_into: ReadInto, origin: str
    ) -> None:
        self._starts = offsets.astype(np.int64).tolist()
        self._stops = (offsets.astype(np.int64) + sizes.astype(np.int64)).tolist()
        self._read_into = read_into
        self._origin = origin
        self._crc32 = [0] * len(self._starts)
        self._range = 0
        self._position = 0
        self._buffer = bytearray(CHECKED_PIECE_BYTES)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes that start at `offset`; return how many were read."""
        self._advance(offset)
        count = self._read_into(offset, buffer)
        already = self._position - offset
        if already < count:
            self._add(buffer[already:count])
        return count

    def finish(self) -> NDArray[np.uint32]:
        """Read the rest, and return the checksum of each range.

        Raises:
            TruncatedError: If the file ends before the last.
        """
        end = max(self._stops, default=0)
        self._advance(end)
        if self._position < end:
            raise TruncatedError(
                f"{self._origin}: ends at byte {self._position}, but its index has contents up to "
                f"byte {end}; the shard is truncated, restore or recreate it"
            )
        return np.array(self._crc32, np.uint32)

    def _advance(self, stop: int) -> None:
        """Read up to byte `stop`."""
        while self._position < stop:
            view = memoryview(self._buffer)[: min(CHECKED_PIECE_BYTES, stop - self._position)]
            count = self._read_into(self._position, view)
            if not count:
                return
            self._add(view[:count])

    def _add(self, data: memoryview) -> None:
        """Process the bytes that follow those processed so far."""
        begin, end = self._position, self._position + len(data)
        while self._range < len(self._starts) and self._starts[self._range] < end:
            start, stop = self._starts[self._range], self._stops[self._range]
            piece = data[max(0, start - begin) : max(0, stop - begin)]
            self._crc32[self._range] = zlib.crc32(piece, self._crc32[self._range])
            if stop > end:
                break
            self._range += 1
        self._position = end


class ShardFile:
    """A shard on this machine or in a store. Used by one thread.

    Args:
        address: Its path or address. Everything is read from its current version.

    Raises:
        DatasetNotFoundError: If it does not exist.
        StorageError: If it cannot be read.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        self.file = range_file(os.fspath(address))
        self.path = self.file.path
        """For messages, without secrets."""
        self._sums: RangeSums | None = None

    def state(self) -> FileState:
        """Return its size and date."""
        if isinstance(self.file, RemoteFile):
            return FileState(self.file.info.size, self.file.info.mtime_ns)
        return file_state(self.path)

    def scan(self, checked: PartTable | None = None) -> TarScan:
        """Return the content of its headers.

        Args:
            checked: The table whose contents `crc32` will be called for, which are then read in
                the same pass; None for none.

        Raises:
            FormatError: If it is not an archive, or is truncated.
        """
        read_into = self._pass()
        if checked is not None:
            self._sums = self._new_sums(checked, read_into)
            read_into = self._sums.read_into
        return scan_archive(read_into, self.state().size, origin=self.path)

    def crc32(self, checked: PartTable | TarScan) -> NDArray[np.uint32]:
        """Return the checksums of the contents that a table lists.

        Raises:
            TruncatedError: If it ends before the last.
        """
        sums, self._sums = self._sums, None
        return (sums or self._new_sums(checked, self._pass())).finish()

    def _new_sums(self, checked: PartTable | TarScan, read_into: ReadInto) -> RangeSums:
        return RangeSums(checked.part_offset, checked.part_size, read_into, self.path)

    def _pass(self) -> ReadInto:
        """Return the function that reads it once, in ascending order."""
        file = self.file
        return (
            SkippingReader(file.object).read_into
            if isinstance(file, RemoteFile)
            else file.read_into
        )


class IndexOptions(NamedTuple):
    """How shards are indexed."""

    checksum: bool = False
    """Whether to read contents as well, and to store a checksum of each."""
    force: bool = False
    """Whether to read shards that have not changed as well."""
    durable: bool = True
    """Whether index files are on disk when a batch is done. If not, the caller must flush them
    before anything relies on them; a damaged one is detected by its checksum."""


def index_batch(dataset: str, names: Sequence[str], options: IndexOptions) -> list[IndexedShard]:
    """Index some shards, and write the index files of those that are new or changed.

    Runs in any process or machine that sees the folder. What was indexed before an error is
    kept.

    Raises:
        FormatError: If a shard is damaged, truncated or empty.
        DatasetNotFoundError: If a shard has vanished.
    """
    indexed: list[IndexedShard] = []
    pending: list[tuple[Path, bytes]] = []
    pending_bytes = 0
    try:
        for name in names:
            path = Path(dataset, name)
            table = None if options.force else known_table(path, checksum=options.checksum)
            was_read = table is None
            if table is None:
                checksum = options.checksum or _had_checksums(path)
                table = scan_shard(ShardFile(path), checksum=checksum)
                files = index_contents(path, table)
                pending += files
                pending_bytes += sum(len(content) for _, content in files)
            indexed.append(summarize(name, table, was_read=was_read))
            if pending_bytes > MAX_PENDING_BYTES:
                write_files(pending, durable=options.durable)
                pending, pending_bytes = [], 0
    finally:
        write_files(pending, durable=options.durable)
    return indexed


def index_shard(path: str, *, checksum: bool = False) -> PartTable:
    """Return the part table of a shard, and write it and the `.tar.idx` if they are missing.

    A shard whose size and modification time are those of its table is not scanned again.

    Args:
        path: The shard.
        checksum: Whether the table needs a checksum of each part.

    Raises:
        FormatError: If the shard is damaged, truncated or empty.
    """
    shard = Path(path)
    table = known_table(shard, checksum=checksum)
    if table is None:
        table = scan_shard(ShardFile(shard), checksum=checksum)
        for target, content in index_contents(shard, table):
            with reporting(target):
                write_atomic(target, content)
    return table


def known_table(path: Path, *, checksum: bool) -> PartTable | None:
    """Return the table of a shard if the index next to it matches the current shard.

    Args:
        path: The shard.
        checksum: Whether a table without checksums is rejected.
    """
    state = file_state(path)
    table_path, index_path = part_table_path(path), tar_index_path(path)
    try:
        with reporting(table_path):
            table = PartTable.open(table_path, verify=True)
        with reporting(index_path):
            index = load_tar_index(index_path)
    except (FileNotFoundError, FormatError, ValueError):
        return None
    same = (table.shard_size, table.shard_mtime_ns) == state
    if not same or len(index) != table.num_samples + 1 or (index != table.sample_offset).any():
        return None
    return None if checksum and table.part_crc32 is None else table


def summarize(name: str, table: PartTable, *, was_read: bool) -> IndexedShard:
    """Return the summary of the part table of a shard."""
    return IndexedShard(
        name=name,
        num_samples=table.num_samples,
        state=FileState(table.shard_size, table.shard_mtime_ns),
        first_key=table.key_at(0),
        last_key=table.key_at(table.num_samples - 1),
        duplicate=_duplicate(table),
        repeated=next(iter(table.repeated_parts()), None),
        was_read=was_read,
        part_names=table.part_names,
    )


def _had_checksums(path: Path) -> bool:
    """Return whether the index of a shard, possibly of an earlier version, has checksums.

    If so, the next one gets them, too, so that they are not lost when a run is killed between a
    shard and its index, or when a shard has changed.
    """
    try:
        return PartTable.open(part_table_path(path)).part_crc32 is not None
    except (OSError, ValueError):
        return False


def index_paths(path: Path) -> tuple[Path, Path]:
    """Return the paths of the files that are written next to a shard."""
    return tar_index_path(path), part_table_path(path)


def index_contents(path: Path, table: PartTable) -> list[tuple[Path, bytes]]:
    """Return the files that are written next to a shard, and their contents."""
    contents = encode_tar_index(table.sample_offset), table.to_bytes()
    return list(zip(index_paths(path), contents, strict=True))


def scan_shard(shard: ShardFile, *, checksum: bool) -> PartTable:
    """Return the table of a shard.

    Raises:
        FormatError: If the shard is damaged, truncated or empty, or changes meanwhile.
    """
    before = shard.state()
    scan = shard.scan()
    if not scan.num_samples:
        raise FormatError(
            f"{shard.path}: has no samples. Files in a shard are named KEY.EXTENSION; links and "
            "folders are ignored. Remove the shard, or skip it with --exclude"
        )
    if checksum:
        scan = replace(scan, part_crc32=shard.crc32(scan))
    if shard.state() != before:
        raise FormatError(
            f"{shard.path}: was modified while it was read; wait until shards are complete, and "
            "run `energon prepare` again"
        )
    return PartTable.from_scan(scan, shard_mtime_ns=before.mtime_ns)


def _duplicate(table: PartTable) -> str | None:
    """Return a key that occurs twice in a shard: such keys are adjacent in ascending order."""
    if table.unique:
        return None
    keys = pairwise(map(table.key_at, range(table.num_samples)))
    repeated = (key for key, following in keys if key == following)
    return next((key.decode("utf-8", "surrogateescape") for key in repeated), None)


PROBED_SAMPLES = 8


def index_remote(shard: ShardFile, copy: Path, options: IndexOptions) -> PartTable:
    """Return the part table of a shard in a store.

    Args:
        shard: The shard.
        copy: Local path next to which the table of an earlier run may be. It is kept if only its
            date differs, as when shards were indexed before they were uploaded.
        options: How to index.

    Raises:
        FormatError: If the shard is damaged, truncated or empty.
    """
    table = None if options.force else _present(shard, copy, options)
    if table is None:
        return scan_shard(shard, checksum=options.checksum)
    return replace(table, shard_mtime_ns=shard.state().mtime_ns)


def _present(shard: ShardFile, copy: Path, options: IndexOptions) -> PartTable | None:
    try:
        table = PartTable.open(part_table_path(copy), verify=True)
    except (FileNotFoundError, FormatError):
        return None
    if table.shard_size != shard.state().size or (options.checksum and table.part_crc32 is None):
        return None
    misplaced = find_misplaced(table, shard.file.pread, count=PROBED_SAMPLES)
    return table if misplaced is None else None


COMPRESSED_SHARDS = (".tgz", ".tar.gz", ".tar.zst", ".tzst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
MAX_BATCH_SHARDS = 256
MIN_BATCH_BYTES = 16 << 20
BATCHES_PER_WORKER = 8
ALONE_SECONDS = 0.2
"""How long this process works alone: a few shards are done before another could start."""


def find_shards(dataset: Path) -> list[str]:
    """Return the paths of all shards below a folder, relative to it, sorted.

    Raises:
        DatasetNotFoundError: If there is no such folder, or no shard in it.
        ConfigError: If shards are compressed.
    """
    files = list_dataset_files(dataset)
    compressed = [name for name in files if name.endswith(COMPRESSED_SHARDS)]
    if compressed:
        target = dataset.resolve()
        raise ConfigError(
            f"{dataset}: {counted(len(compressed), 'shard is', 'shards are')} compressed, e.g. "
            f"{compressed[0]}; their samples cannot be read one by one. Rewrite them as plain "
            "shards with\n\n"
            f"    energon pack {quote(str(dataset))} "
            f"{quote(str(target.with_name(target.name + '_tar')))}"
        )
    shards = [name for name in files if name.endswith(".tar")]
    if not shards:
        raise DatasetNotFoundError(
            f"{dataset}: there is no .tar file in this folder or below: it {advice(str(dataset))}"
        )
    return shards


def run_on_shards(
    function: Callable[[str, Sequence[str], A], list[T]],
    dataset: Path,
    shards: Sequence[str],
    argument: A,
    *,
    engine: Engine,
    progress: Progress = no_progress,
) -> Iterator[T]:
    """Call a function for all shards, some at a time, and yield the results in their order.

    Args:
        function: Takes the folder, some of the shards, and `argument`; returns a result for each.
        dataset: Folder of the dataset.
        shards: Paths below it.
        argument: Passed on to the function.
        engine: Where to run.
        progress: Called with the number of finished shards, and the total.
    """
    calls = [(str(dataset), batch, argument) for batch in _batches(dataset, shards, engine)]
    ready: dict[int, list[T]] = {}
    done = following = 0
    for number, results in _run(function, calls, engine):
        ready[number] = results
        done += len(results)
        progress(done, len(shards))
        while following in ready:
            yield from ready.pop(following)
            following += 1


def _run(
    function: Callable[..., T], calls: Sequence[tuple[Any, ...]], engine: Engine
) -> Iterator[tuple[int, T]]:
    alone = 0
    if engine.name == "local":
        stop = time.monotonic() + ALONE_SECONDS
        while alone < len(calls) and time.monotonic() < stop:
            yield alone, function(*calls[alone])
            alone += 1
    if alone < len(calls):
        for number, result in run_batches(engine, function, calls[alone:]):
            yield number + alone, result


def _batches(dataset: Path, shards: Sequence[str], engine: Engine) -> list[list[str]]:
    """Return runs of shards that take about the same time."""
    sizes = [_size(dataset / shard) for shard in shards]
    limit = max(MIN_BATCH_BYTES, sum(sizes) // (BATCHES_PER_WORKER * engine.num_workers))
    batches: list[list[str]] = []
    filled = 0
    for shard, size in zip(shards, sizes, strict=True):
        if not batches or filled + size > limit or len(batches[-1]) == MAX_BATCH_SHARDS:
            batches.append([])
            filled = 0
        batches[-1].append(shard)
        filled += size
    return batches


def _size(shard: Path) -> int:
    """Return the size of a shard; 0 if it is missing, which is reported where it is read."""
    try:
        return file_state(shard).size
    except DatasetNotFoundError:
        return 0


def sqlite_path(dataset: Path) -> Path:
    """Return where the SQL index of a dataset is."""
    return dataset / META / "index.sqlite"


def open_table(dataset: Path, name: str) -> PartTable:
    """Return the part table of an indexed shard."""
    path = part_table_path(dataset / name)
    with reporting(path):
        return PartTable.open(path)


def write_name_index(
    dataset: Path,
    names: Sequence[str],
    shards: Iterable[IndexedShard],
    target: Path,
    *,
    rewrite: bool = False,
) -> bool:
    """Write the SQL index of a dataset to `target`, unless the current one is up to date.

    Args:
        dataset: The folder.
        names: All shards, in their order.
        shards: The same shards, as they become indexed; all of them are consumed.
        target: An empty file.
        rewrite: Whether to write all of it, whatever the current one claims.

    Returns:
        Whether it was written.

    Raises:
        DuplicateSampleKeyError: If two samples have the same key.
    """
    path = sqlite_path(dataset)
    present = [] if rewrite else indexed_shards(path) or []
    current = _states(dataset, names)
    following = iter(shards)
    if not present or present != current[: len(present)]:
        with reporting(path), writing_file(path):
            write_sqlite_index(target, _tables(dataset, following))
            _copy_media(path, target)
        return True
    for _ in islice(following, len(present)):
        pass  # indexed, and already in the SQL index
    if len(present) == len(current):
        list(following)
        return False
    with reporting(path), writing_file(path):
        shutil.copyfile(path, target)
        extend_sqlite_index(target, _tables(dataset, following))
    return True


def is_name_index_of(dataset: Path, names: Sequence[str], *, or_else: bool) -> bool:
    """Return whether the SQL index of a dataset matches its current shards.

    Args:
        dataset: The folder.
        names: All shards, in their order.
        or_else: The answer for an index that does not record its shards.
    """
    present = indexed_shards(sqlite_path(dataset))
    return or_else if present is None else present == _states(dataset, names)


def has_media(dataset: Path) -> bool:
    """Return whether the SQL index contains more than can be made from the shards."""
    path = sqlite_path(dataset)
    if path.is_file():
        with suppress(FormatError), SqliteReader(path) as reader:
            return "media_metadata" in reader.tables
    return False


def _copy_media(source: Path, target: Path) -> None:
    if not source.is_file():
        return
    try:
        with writing_file(target):
            copy_media(source, target)
    except (FormatError, sqlite3.DatabaseError) as error:
        logger.warning(
            "%s: media metadata that it may have had is lost: %s; `energon prepare-media` "
            "creates it again",
            source,
            error,
        )


def _tables(dataset: Path, shards: Iterator[IndexedShard]) -> Iterator[ShardToIndex]:
    return (ShardToIndex(shard.name, open_table(dataset, shard.name)) for shard in shards)


def _states(dataset: Path, names: Sequence[str]) -> list[ShardState]:
    return [ShardState(name, *file_state(dataset / name)) for name in names]


def commit_dataset(
    dataset: Path,
    info: DatasetInfo,
    documents: Iterable[tuple[str, str]],
    *,
    changed: bool,
    sqlite: Path | None,
    keeps_sqlite: bool,
    unflushed: Sequence[Path] = (),
) -> None:
    """Write the files of `.nv-meta`.

    The list of shards determines what the dataset consists of. While splits are replaced, it has
    the shards of both the old and the new ones. While the list is replaced, the SQL index, which
    refers to shards by number, is either absent or matches.

    Args:
        dataset: The folder.
        info: The shards.
        documents: Names and contents of other files.
        changed: Whether shards are new or changed.
        sqlite: A new SQL index under a temporary name; None if there is none.
        keeps_sqlite: Whether the current SQL index matches these shards.
        unflushed: Files next to the shards that must be on disk before the dataset has them.
    """
    meta = dataset / META
    present: Mapping[str, int] = {}
    with suppress(EnergonError):
        present = load_info(dataset).shard_counts
    names = list(info.shard_counts)
    changed |= list(present) != names
    removed = {name: count for name, count in present.items() if name not in info.shard_counts}
    heads = []
    if changed or sqlite is not None or not (meta / "index.uuid").exists():
        heads.append((meta / "index.uuid", str(uuid4())))
    heads += _lists(meta, replace(info, shard_counts={**info.shard_counts, **removed}))
    tails = [(meta / name, text) for name, text in documents]
    tails += _lists(meta, info) if removed else []
    first, second = (
        stage_files(((path, text.encode()) for path, text in files), durable=False)
        for files in (heads, tails)
    )
    staged = [temporary for temporary, _ in (*first, *second)]
    flush_files([*unflushed, *staged, *([] if sqlite is None else [sqlite])])
    target = sqlite_path(dataset)
    with reporting(target):
        if list(present) != names[: len(present)] or (sqlite is None and not keeps_sqlite):
            target.unlink(missing_ok=True)
        commit_files(first)
        if sqlite is not None:
            publish(sqlite, target)
        commit_files(second)


def _lists(meta: Path, info: DatasetInfo) -> list[tuple[Path, str]]:
    """Return the files that list the shards, including that of early releases if it exists."""
    files = [(meta / ".info.json", info.to_json())]
    if (meta / ".info.yaml").exists():
        files.insert(0, (meta / ".info.yaml", dump_yaml({"shard_counts": dict(info.shard_counts)})))
    return files
