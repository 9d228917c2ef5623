"""A prepared dataset as a tree of files: its samples by key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from energon.formats.info import load_info
from energon.formats.part_table import PartTable
from energon.io.epath import AnyPath, any_path
from energon.sources.browse import BrowsedFile, Entry, Folder
from energon.sources.browse_names import escape_name, unescape_name
from energon.sources.file_store_index import KeyIndex
from energon.sources.shards import OpenShard, ShardPool


class SampleFinder:
    """Finds samples of a dataset by key, and lists those whose key begins in some way.

    Args:
        dataset: Folder of the dataset.
        pool: Where shards are opened.
    """

    def __init__(self, dataset: str | os.PathLike[str], pool: ShardPool) -> None:
        self.dataset: AnyPath = any_path(dataset)
        self.pool = pool
        self.counts = list(load_info(self.dataset).shard_counts.items())

    def open(self, shard: int) -> OpenShard:
        """Return a shard, open."""
        name, count = self.counts[shard]
        path = os.fspath(self.dataset / name)
        return self.pool.open(path, num_samples=count, dataset=self.dataset)

    def find(self, key: str) -> tuple[int, int] | None:
        """Return shard and number of the sample that has this key, or None."""
        wanted = key.encode("utf-8", "surrogateescape")
        for shard, sample in self._index.find(wanted):
            if self.open(shard).table.key_of(sample) == key:
                return shard, sample
        return None

    def parts(self, place: tuple[int, int]) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name."""
        shard, sample = place
        table, file = self.open(shard)
        return {
            name: BrowsedFile(file, offset, size, table.shard_mtime_ns)
            for name, offset, size in table.sample_parts(sample)
        }

    def below(self, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the rests of the keys that begin with `prefix`, up to a slash, with their places.

        Folders, which have a slash behind, are there once for each shard.
        """
        for shard in range(len(self.counts)):
            for rest, sample in _below(self.open(shard).table, prefix):
                yield rest, (shard, sample)

    def has_folder(self, prefix: str) -> bool:
        """Return whether there are keys that begin with `prefix`."""
        return self.is_nested and any(True for _ in self.below(prefix))

    @cached_property
    def is_nested(self) -> bool:
        """Whether there are keys with slashes."""
        slash = ord("/")
        return any(slash in self.open(shard).table.key_bytes for shard in range(len(self.counts)))

    @cached_property
    def _index(self) -> KeyIndex:
        shards = range(len(self.counts))
        if not isinstance(self.dataset, Path):
            self.pool.open_together(self.open, shards)
        return KeyIndex(self.open(shard).table for shard in shards)


@dataclass(frozen=True)
class FlatFolder:
    """The samples whose keys begin with `prefix`, as files `KEY.PART`."""

    samples: SampleFinder
    prefix: str = ""

    def entries(self) -> Iterator[Entry]:
        """Yield files and folders."""
        seen = set()
        for rest, place in self.samples.below(self.prefix):
            if rest.endswith("/"):
                if rest not in seen:
                    seen.add(rest)
                    yield Entry(escape_name(rest[:-1]), True)
                continue
            for part in self.samples.parts(place):
                yield Entry(escape_name(f"{rest}.{part}"), False)

    def find(self, name: str) -> Folder | BrowsedFile | None:
        """Return a file or folder by name."""
        raw = unescape_name(name)
        if raw is None:
            return None
        if self.samples.has_folder(f"{self.prefix}{raw}/"):
            return FlatFolder(self.samples, f"{self.prefix}{raw}/")
        key, dot, part = raw.partition(".")
        place = self.samples.find(self.prefix + key) if dot and key else None
        return None if place is None else self.samples.parts(place).get(part)


@dataclass(frozen=True)
class SampleFolder:
    """The samples whose keys begin with `prefix`, as folders `KEY` with files `PART`."""

    samples: SampleFinder
    prefix: str = ""
    place: tuple[int, int] | None = None
    """The sample whose parts are in this folder, if there is one."""

    def entries(self) -> Iterator[Entry]:
        """Yield files and folders."""
        seen = set()
        for rest, _ in () if self.prefix and not self.samples.is_nested else self._below():
            if rest not in seen:
                seen.add(rest)
                yield Entry(escape_name(rest), True)
        if self.place is not None:
            for part in self.samples.parts(self.place):
                if part not in seen:
                    yield Entry(escape_name(part), False)

    def find(self, name: str) -> Folder | BrowsedFile | None:
        """Return a file or folder by name."""
        raw = unescape_name(name)
        if raw is None:
            return None
        key = self.prefix + raw
        place = self.samples.find(key)
        if place is not None or self.samples.has_folder(f"{key}/"):
            return SampleFolder(self.samples, f"{key}/", place)
        return None if self.place is None else self.samples.parts(self.place).get(raw)

    def _below(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for rest, place in self.samples.below(self.prefix):
            yield rest.removesuffix("/"), place


def _below(table: PartTable, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield rests of keys in ascending order, folders once, and the numbers of samples."""
    wanted = prefix.encode("utf-8", "surrogateescape")
    order = table.columns.get("key_order")
    at = _first_from(table, wanted, 0)
    while at < table.num_samples:
        key = table.key_at(at)
        if not key.startswith(wanted):
            return
        rest, slash, _ = key[len(wanted) :].partition(b"/")
        yield (
            (rest + slash).decode("utf-8", "surrogateescape"),
            at if order is None else int(order[at]),
        )
        # What comes after a folder begins with the character that follows the slash.
        at = _first_from(table, wanted + rest + b"0", at) if slash else at + 1


def _first_from(table: PartTable, key: bytes, low: int) -> int:
    """Return the place of the first key, in ascending order, that is not before `key`."""
    high = table.num_samples
    while low < high:
        middle = (low + high) // 2
        if table.key_at(middle) < key:
            low = middle + 1
        else:
            high = middle
    return low
