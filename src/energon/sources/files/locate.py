"""Where the files of a prepared WebDataset are: from the part tables, or from `index.sqlite`.

Part tables are looked up through an index of keys, in memory, or on local disk, where all processes
map the same one. It has sixteen bytes per sample, and no keys: equal hashes are candidates, and the
reader of a shard compares the key there.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon.errors import ConfigError, FormatError, NoSuchFileError
from energon.formats.media import MediaMetadata
from energon.formats.meta.info import META, load_info
from energon.formats.tables.part_table import PartTable, key_hash, part_table_path, table_hashes
from energon.formats.tables.sqlite_file import SqliteFile, SqliteReader, ThreadReaders, name_of
from energon.formats.tables.sqlite_index import MediaTable
from energon.formats.tar.headers import BLOCK, split_name
from energon.formats.tar.scan import iter_members
from energon.io.disk_cache import disk_cache
from energon.io.epath import AnyPath, EPath
from energon.io.range_file import RangeFile, range_file
from energon.io.threads import fork_safe_lock
from energon.messages import shell_word
from energon.samples.crude import find_part
from energon.sources.shards import OpenShard, ShardPool


class FileRange(NamedTuple):
    """Where the content of a file is."""

    shard: str
    """The shard, as listed by the dataset."""
    file: RangeFile
    offset: int
    size: int


class Locator(Protocol):
    """Finds the parts of samples. May be used by many threads."""

    def find(self, key: str, part: str) -> FileRange | None:
        """Return where a part of a sample is, or None if there is no such sample or part."""

    def names(self) -> Iterator[str]:
        """Yield the names of all files, in the order of the dataset."""


def open_locator(dataset: AnyPath, pool: ShardPool) -> Locator:
    """Return the fastest locator for the files of a dataset.

    Part tables come first. Datasets prepared by other tools have none, but they have the SQL
    index; if that is missing, too, their shards are scanned once.
    """
    shards = list(load_info(dataset).shard_counts)
    if isinstance(dataset, EPath):
        shards = shards[:1]  # each takes a request, and all were indexed by the same tool
    tables = [dataset / f"{shard}.parts" for shard in shards]
    index = dataset / META / "index.sqlite"
    if index.is_file() and not all(table.is_file() for table in tables):
        return SqliteLocator(dataset, local_copy(index))
    return TableLocator(dataset, pool)


def local_copy(index: AnyPath) -> SqliteFile:
    """Return a local path of an `index.sqlite`: its own, or that of a copy of this version of it.

    If no disk has room for a copy, its content is returned.
    """
    if isinstance(index, Path):
        return index
    info = index.stat()
    return disk_cache().keep(str(index), f"{info.version} {info.size}", index.read_bytes)


class TableLocator:
    """Finds files by the part tables of the shards, through an index of keys in memory."""

    def __init__(self, dataset: AnyPath, pool: ShardPool) -> None:
        self.dataset = dataset
        self.counts = list(load_info(dataset).shard_counts.items())
        self.pool = pool
        self.paths = [os.fspath(dataset / shard) for shard, _ in self.counts]

    def find(self, key: str, part: str) -> FileRange | None:
        """Return where a part of a sample is, or None."""
        encoded = key.encode("utf-8", "surrogateescape")
        for shard, sample in self._index.find(encoded):
            opened = self._open(shard)
            table = opened.table
            if table.encoded_key(sample) == encoded:
                number = _part_number(table, sample, part)
                if number is None:
                    return None
                offset = int(table.columns["part_block"][number]) * BLOCK
                size = int(table.columns["part_size"][number])
                return FileRange(self.counts[shard][0], opened.file, offset, size)
        return None

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        for shard in range(len(self.paths)):
            table = self._open(shard).table
            for sample, key in enumerate(table.keys(np.arange(table.num_samples))):
                for part, _, _ in table.sample_parts(sample):
                    yield f"{key}.{part}"

    @cached_property
    def _index(self) -> KeyIndex:
        return shared_index(self.dataset, dict(self.counts), self._make_index)

    def _make_index(self) -> KeyIndex:
        if isinstance(self.dataset, EPath):
            self.pool.open_together(self._open, range(len(self.paths)))
        return KeyIndex(self._open(shard).table for shard in range(len(self.paths)))

    def _open(self, shard: int) -> OpenShard:
        count = self.counts[shard][1]
        return self.pool.open(self.paths[shard], num_samples=count, dataset=self.dataset)


def _part_number(table: PartTable, sample: int, part: str) -> int | None:
    """Return the number of a part of a sample, or None if it has no such part."""
    if table.schema is not None:
        first, names = sample * len(table.schema), table.schema
    else:
        first, stop = table.columns["first_part"][sample : sample + 2].tolist()
        names = tuple(table.columns["part_name"][first:stop].tolist())
    called = [table.part_names[name] for name in names]
    same = part if part in called else find_part(called, part)
    return None if same is None else first + called.index(same)


_PART = """
SELECT tar_file_id, content_byte_offset, content_byte_size
FROM samples JOIN sample_parts USING (tar_file_id, sample_index)
WHERE sample_key = ? AND part_name = ?
"""
_PARTS = """
SELECT part_name, tar_file_id, content_byte_offset, content_byte_size
FROM samples JOIN sample_parts USING (tar_file_id, sample_index)
WHERE sample_key = ? ORDER BY content_byte_offset
"""
_SAMPLE = "SELECT tar_file_id, byte_offset, byte_size FROM samples WHERE sample_key = ?"
_KEYS = "SELECT sample_key FROM samples ORDER BY 1"
_NAMES = """
SELECT sample_key || '.' || part_name
FROM samples JOIN sample_parts USING (tar_file_id, sample_index)
ORDER BY tar_file_id, sample_index, content_byte_offset
"""


class SqliteLocator:
    """Finds files through `index.sqlite`. Early ones list only samples: their headers are read."""

    def __init__(self, dataset: AnyPath, index: SqliteFile) -> None:
        self.dataset = dataset
        self.index = index
        self.shards = list(load_info(dataset).shard_counts)
        self._files: dict[str, RangeFile] = {}
        self._readers = ThreadReaders(index)
        tables = self._readers.get().tables
        if "samples" not in tables:
            raise ConfigError(
                f"{name_of(index)}: has no table of samples; run `energon prepare "
                f"{shell_word(dataset)}` again"
            )
        self.has_parts = "sample_parts" in tables

    def find(self, key: str, part: str) -> FileRange | None:
        """Return where a part of a sample is, or None."""
        row = self._readers.get().first(_PART, (key, part)) if self.has_parts else None
        if row is None:
            file_ranges = {name: file_range for (_, name), file_range in self.members(key)}
            same = part if part in file_ranges else find_part(file_ranges, part)
            return None if same is None else file_ranges[same]
        return self._range(*row)

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        with SqliteReader(self.index) as reader:
            if self.has_parts:
                yield from (reader.text(name) for (name,) in reader.rows(_NAMES))
                return
            keys = [reader.text(key) for (key,) in reader.rows(_KEYS)]
        for key in keys:
            yield from (".".join(name) for name, _ in self._members(key))

    def members(self, key: str) -> Iterator[tuple[tuple[str, str], FileRange]]:
        """Yield key, part and range of all parts of a sample; nothing if it does not exist."""
        if not self.has_parts:
            yield from self._members(key)
            return
        reader = self._readers.get()
        for part, *numbers in reader.rows(_PARTS, (key,)):
            yield (key, reader.text(part)), self._range(*numbers)

    def _members(self, key: str) -> Iterator[tuple[tuple[str, str], FileRange]]:
        reader = self._readers.get()
        row = reader.first(_SAMPLE, (key,))
        if row is None:
            return
        shard, begin, length = reader.numbers(*row)
        file = self.file(shard)

        def read(offset: int, size: int) -> bytes:
            return file.pread(begin + offset, min(size, length - offset))

        for member in iter_members(read, length, origin=file.path, strict=False):
            name = split_name(member.name)
            if name is not None:
                file_range = FileRange(self._shard(shard), file, begin + member.offset, member.size)
                yield name, file_range

    def _range(self, *numbers: object) -> FileRange:
        shard, offset, size = self._readers.get().numbers(*numbers)
        return FileRange(self._shard(shard), self.file(shard), offset, size)

    def _shard(self, number: int) -> str:
        if not 0 <= number < len(self.shards):
            raise FormatError(
                f"{name_of(self.index)}: names shard number {number}, but .info.json lists "
                f"{len(self.shards)}; run `energon prepare {shell_word(self.dataset)}` again"
            )
        return self.shards[number]

    def file(self, shard: int) -> RangeFile:
        """Return an open shard."""
        path = os.fspath(self.dataset / self._shard(shard))
        return self._files.get(path) or self._files.setdefault(path, range_file(path))


class LazyLocator:
    """A locator that is opened on first use, once for all threads. Copies begin closed."""

    def __init__(self, dataset: AnyPath, pool: ShardPool) -> None:
        self.dataset = dataset
        self.pool = pool
        self._lock = fork_safe_lock()
        self._opened: Locator | None = None

    def __reduce__(self) -> tuple[type[LazyLocator], tuple[AnyPath, ShardPool]]:
        return LazyLocator, (self.dataset, self.pool)

    def get(self) -> Locator:
        """Return the locator."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = open_locator(self.dataset, self.pool)
        return self._opened


class MediaLookup:
    """The media metadata of a dataset or folder, opened on first use.

    May be used by many threads, and pickled.

    Args:
        folder: The dataset or folder.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder
        self._table: MediaTable | None = None
        self._lock = fork_safe_lock()

    def __reduce__(self) -> tuple[type[MediaLookup], tuple[AnyPath]]:
        return MediaLookup, (self.folder,)

    def get(self, name: str) -> MediaMetadata:
        """Return the metadata of a file.

        Raises:
            ConfigError: If there are no media metadata.
            NoSuchFileError: If there are none for this file.
        """
        if self._table is None:
            with self._lock:
                self._table = self._table or self._open()
        metadata = self._table.get(name)
        if metadata is None:
            raise NoSuchFileError(
                f"{self.folder} has no media metadata for {name!r}: there is no such file, or it "
                "was not a media file, or was damaged, when `energon prepare-media` read it"
            )
        return metadata

    def _open(self) -> MediaTable:
        index = self.folder / META / "index.sqlite"
        if not index.is_file():
            raise ConfigError(
                f"{self.folder} has no media metadata; run `energon prepare-media "
                f"{shell_word(self.folder)} --media-metadata-by-extension`"
            )
        return MediaTable(local_copy(index))


logger = logging.getLogger("energon")

KEY_INDEX_MAGIC = b"EKEYS\x02\0\0"


class KeyIndex:
    """Which samples of which shards may have a key.

    Args:
        tables: The tables of all shards, in the order in which shards are numbered.
    """

    def __init__(self, tables: Iterable[PartTable]) -> None:
        hashes, samples = [_EMPTY], [_EMPTY]
        for shard, table in enumerate(tables):
            hashes.append(table_hashes(table, np.arange(table.num_samples))[:, 0])
            samples.append(np.arange(table.num_samples, dtype=np.uint64) + np.uint64(shard << 32))
        joined = np.concatenate(hashes)
        order = np.argsort(joined, kind="stable")
        # Memory views return single numbers three times as fast as arrays do.
        self._hashes: memoryview = joined[order].data
        self._samples: memoryview = np.concatenate(samples)[order].data

    @classmethod
    def from_buffer(cls, data: Any, *, origin: str) -> KeyIndex:
        """Return the index that `to_bytes` turned into `data`, which is not copied.

        Raises:
            FormatError: If it is not an index.
        """
        view = memoryview(data)
        count, rest = divmod(len(view) - len(KEY_INDEX_MAGIC), 16)
        if view[: len(KEY_INDEX_MAGIC)] != KEY_INDEX_MAGIC or rest:
            raise FormatError(f"{origin}: {len(view)} bytes are not an index of keys")
        numbers = view[len(KEY_INDEX_MAGIC) :].cast("B").cast("Q")
        index = cls.__new__(cls)
        index._hashes, index._samples = numbers[:count], numbers[count:]
        return index

    def to_bytes(self) -> bytes:
        """Return it as bytes in the order of this machine: magic number, hashes, samples."""
        return b"".join((KEY_INDEX_MAGIC, self._hashes, self._samples))

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, key: bytes) -> Iterator[tuple[int, int]]:
        """Yield shard and number of each sample that may have `key`; very rarely more than one."""
        target = key_hash(key)
        hashes: Any = self._hashes
        at = bisect_left(hashes, target)
        while at < len(hashes) and hashes[at] == target:
            sample = self._samples[at]
            yield sample >> 32, sample & 0xFFFFFFFF
            at += 1

    def collisions(self) -> list[tuple[int, int]]:
        """Return shard and number of samples that have the same hash as another, one of each."""
        hashes = np.asarray(self._hashes)
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        samples = np.asarray(self._samples)[same]
        return list(zip((samples >> 32).tolist(), (samples & 0xFFFFFFFF).tolist(), strict=True))


_EMPTY = np.empty(0, np.uint64)


SHARED_SAMPLES = 1 << 19
"""From this many samples on, an index is stored: a smaller one is made faster than found."""


def shared_index(
    dataset: AnyPath,
    counts: Mapping[str, int],
    make: Callable[[], KeyIndex],
    *,
    shared_samples: int = SHARED_SAMPLES,
) -> KeyIndex:
    """Return the key index of a dataset.

    Args:
        dataset: Address of the dataset.
        counts: Its shards, and how many samples each has.
        make: Makes the index in memory; called if it is not on disk, or cannot be stored there.
        shared_samples: From this many samples on, it is kept on disk.
    """
    if sum(counts.values()) < shared_samples:
        return make()
    version = _version(dataset, counts)
    if version is None:
        return make()
    try:
        return disk_cache().load(
            f"keys of {dataset}",
            version,
            lambda: make().to_bytes(),
            partial(KeyIndex.from_buffer, origin=f"the keys of {dataset}"),
        )
    except (ConfigError, OSError) as error:
        logger.warning(
            "the key index of %s could not be shared and is loaded in every process: %s",
            dataset,
            error,
        )
        return make()


def _version(dataset: AnyPath, counts: Mapping[str, int]) -> str | None:
    """Return a value that differs after the dataset was prepared again; None if there is none."""
    uuid = dataset / META / "index.uuid"
    if not uuid.is_file():
        return None
    lines = [uuid.read_text()]
    for shard, count in counts.items():
        lines.append(f"{shard} {count}")
        if isinstance(dataset, Path):
            table = os.stat(part_table_path(dataset / shard))
            lines.append(f"{table.st_size} {table.st_mtime_ns}")
    return blake2b(os.fsencode("\n".join(lines)), digest_size=16).hexdigest()
