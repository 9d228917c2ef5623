"""Samples of a dataset by key, and in the order of keys: the basis for trees of datasets."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np

from energon.errors import EnergonError
from energon.formats.meta.info import META, load_info
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import SqliteFile, ThreadReaders
from energon.io.epath import AnyPath, EPath
from energon.io.range_file import RangeFile
from energon.sources.browse.tree import BrowsedFile
from energon.sources.files.key_index import KeyIndex
from energon.sources.files.locate import SqliteLocator, local_copy
from energon.sources.shards import OpenShard, ShardPool

logger = logging.getLogger("energon")
TOGETHER = 1000
"""Keys that are fetched from `index.sqlite` at a time."""


class SamplePlace(NamedTuple):
    """A sample: the number of its shard in the list of the dataset, and its number in the shard."""

    shard: int
    sample: int


class Child(NamedTuple):
    """What is below the beginning of a key, up to the next slash."""

    name: str
    place: SamplePlace | None
    """The sample that has this key; None for a folder of samples."""


class BrowsedSamples(Protocol):
    """The samples of a dataset. May be used by many threads."""

    shards: list[str]
    """Paths of the shards."""

    def find(self, key: str) -> SamplePlace | None:
        """Return the first sample that has this key, or None."""

    def parts(self, place: SamplePlace) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name; of two with the same name, the first."""

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`. Folders may occur repeatedly."""

    @property
    def repeated(self) -> dict[SamplePlace, int]:
        """Samples whose key an earlier one has, and how many of those there are."""

    @property
    def is_nested(self) -> bool:
        """Whether there are keys with slashes."""


def open_samples(dataset: AnyPath, pool: ShardPool) -> BrowsedSamples:
    """Return the samples of a dataset, from its part tables or else from `index.sqlite`.

    Raises:
        DatasetNotFoundError: If it is not prepared.
    """
    counts = load_info(dataset).shard_counts
    first = next(iter(counts), None)
    index = dataset / META / "index.sqlite"
    if first is not None and not (dataset / f"{first}.parts").is_file() and index.is_file():
        return SqliteSamples(dataset, local_copy(index))
    return TableSamples(dataset, pool)


class TableSamples:
    """Samples by the part tables of the shards. Shards that cannot be opened are skipped.

    Args:
        dataset: Folder of the dataset.
        pool: Opens the shards.
    """

    def __init__(self, dataset: AnyPath, pool: ShardPool) -> None:
        self.dataset = dataset
        self.pool = pool
        self.counts = list(load_info(dataset).shard_counts.items())
        self.shards = [name for name, _ in self.counts]

    def open(self, shard: int) -> OpenShard:
        """Return an open shard."""
        name, count = self.counts[shard]
        path = os.fspath(self.dataset / name)
        return self.pool.open(path, num_samples=count, dataset=self.dataset)

    def find(self, key: str) -> SamplePlace | None:
        """Return the first sample that has this key, or None."""
        return next(self._places(key.encode("utf-8", "surrogateescape")), None)

    def parts(self, place: SamplePlace) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name."""
        table = self.open(place.shard).table
        find = partial(self._file, place.shard)
        found: dict[str, BrowsedFile] = {}
        for name, offset, size in table.sample_parts(place.sample):
            found.setdefault(name, BrowsedFile(find, offset, size, table.shard_mtime_ns))
        return found

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`, shard by shard."""
        for shard in self._readable:
            for name, sample in _below(self.open(shard).table, prefix):
                yield Child(name, None if sample is None else SamplePlace(shard, sample))

    @cached_property
    def repeated(self) -> dict[SamplePlace, int]:
        """Samples whose key an earlier one has, and how many of those there are."""
        found: dict[SamplePlace, int] = {}
        for number, sample in self._index.collisions():
            table = self.open(self._readable[number]).table
            for count, place in enumerate(self._places(table.encoded_key(sample))):
                if count:
                    found[place] = count
        return found

    @cached_property
    def is_nested(self) -> bool:
        """Whether there are keys with slashes."""
        keys = (self.open(shard).table.key_bytes for shard in self._readable)
        return any((np.frombuffer(some, np.uint8) == _SLASH).any() for some in keys)

    @cached_property
    def _readable(self) -> list[int]:
        """The shards that can be opened; an error if there is none."""
        numbers = range(len(self.shards))
        if isinstance(self.dataset, EPath):
            self.pool.open_together(self.open, numbers)
        found = [shard for shard in numbers if self._can_open(shard)]
        if not found and self.shards:
            self.open(0)
        return found

    def _can_open(self, shard: int) -> bool:
        try:
            self.open(shard)
        except EnergonError as error:
            logger.warning("a shard cannot be shown: %s", error)
            return False
        return True

    @cached_property
    def _index(self) -> KeyIndex:
        return KeyIndex(self.open(shard).table for shard in self._readable)

    def _file(self, shard: int) -> RangeFile:
        return self.open(shard).file

    def _places(self, key: bytes) -> Iterator[SamplePlace]:
        """Yield the samples that have this key, in the order of the dataset."""
        for number, sample in sorted(self._index.find(key)):
            shard = self._readable[number]
            if self.open(shard).table.encoded_key(sample) == key:
                yield SamplePlace(shard, sample)


class SqliteSamples:
    """Samples by `index.sqlite`, as other tools write it.

    Args:
        dataset: Folder of the dataset.
        index: The file, on this machine.
    """

    is_nested = True
    """Always assumed: looking for them costs no more than asking the index."""

    def __init__(self, dataset: AnyPath, index: SqliteFile) -> None:
        self._locator = SqliteLocator(dataset, index)
        self._readers = ThreadReaders(index)
        self.shards = self._locator.shards
        self.repeated: dict[SamplePlace, int] = {}  # the index has every key once

    def find(self, key: str) -> SamplePlace | None:
        """Return the sample that has this key, or None."""
        try:
            found = self._readers.get().first(_FIND, (key,))
        except UnicodeEncodeError:  # bytes that are not text, which the index cannot contain
            return None
        return None if found is None else self._place(*found)

    def parts(self, place: SamplePlace) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name."""
        key = self._readers.get().first(_KEY, place)
        found: dict[str, BrowsedFile] = {}
        for (_, name), part in () if key is None else self._locator.members(key[0]):
            find = partial(self._locator.file, place.shard)
            found.setdefault(name, BrowsedFile(find, part.offset, part.size))
        return found

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`, in their order."""
        low, high = prefix, None if not prefix else _behind(prefix)
        while True:
            reader = self._readers.get()
            rows = list(reader.rows(_FROM if high is None else _RANGE, (low, high)))
            for found, *place in rows:
                key = reader.text(found)
                rest, slash, _ = key[len(prefix) :].partition("/")
                yield Child(rest, None if slash else self._place(*place))
                # What comes after a folder begins with the character that follows the slash.
                low = f"{prefix}{rest}0" if slash else key + "\0"
                if slash:
                    break
            if not rows:
                return

    def _place(self, *numbers: object) -> SamplePlace:
        return SamplePlace(*self._readers.get().numbers(*numbers))


_SLASH = ord("/")
_FIND = "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?"
_KEY = "SELECT sample_key FROM samples WHERE tar_file_id = ? AND sample_index = ?"
_COLUMNS = "SELECT sample_key, tar_file_id, sample_index FROM samples"
_FROM = f"{_COLUMNS} WHERE sample_key >= ?1 AND ?2 IS NULL ORDER BY sample_key LIMIT {TOGETHER}"
_RANGE = (
    f"{_COLUMNS} WHERE sample_key >= ?1 AND sample_key < ?2 ORDER BY sample_key LIMIT {TOGETHER}"
)


def _behind(prefix: str) -> str:
    """Return the first text after all keys that begin with `prefix`, which ends in a slash."""
    return prefix[:-1] + "0"


def _below(table: PartTable, prefix: str) -> Iterator[tuple[str, int | None]]:
    """Yield rests of keys in ascending order up to a slash, and the numbers of samples."""
    encoded = prefix.encode("utf-8", "surrogateescape")
    at = table.first_from(encoded)
    while at < table.num_samples:
        key = table.key_at(at)
        if not key.startswith(encoded):
            return
        rest, slash, _ = key[len(encoded) :].partition(b"/")
        yield rest.decode("utf-8", "surrogateescape"), None if slash else table.index_at(at)
        # What comes after a folder begins with the character that follows the slash.
        at = table.first_from(encoded + rest + b"0", at) if slash else at + 1
