"""What is at an address, as a tree: a dataset with its samples by key, or a metadataset."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from energon.errors import DatasetNotFoundError, EnergonError
from energon.formats.meta.info import META, load_info
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.sqlite_file import SqliteFile, ThreadReaders
from energon.io.address import address_name, is_remote, local_path
from energon.io.backends.local import OpenFile
from energon.io.epath import AnyPath, EPath, any_path
from energon.io.files import list_files
from energon.io.range_file import RangeFile, RemoteFile
from energon.metadataset.document import read_metadataset
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import Leaf
from energon.metadataset.resolve import resolve
from energon.sources.files.locate import KeyIndex, SqliteLocator, local_copy
from energon.sources.files.open import folder_of
from energon.sources.kinds import kind_named
from energon.sources.shards import OpenShard, ShardPool
from energon.sources.tree import (
    MARK,
    BrowsedFile,
    BrowsedFolder,
    NamedFolders,
    TreeEntry,
    escape_name,
    mark_name,
    unescape_name,
)

BrowsedEntry = BrowsedFolder | BrowsedFile


@dataclass(frozen=True)
class _KeyFolder(ABC):
    """A folder of samples whose keys begin alike; names of entries say what they stand for."""

    samples: BrowsedSamples

    @abstractmethod
    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]: ...

    @abstractmethod
    def _find(self, raw: str) -> BrowsedEntry | None: ...

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders."""
        return (
            TreeEntry(name, not isinstance(entry, BrowsedFile)) for name, entry in self._children()
        )

    def find(self, name: str) -> BrowsedEntry | None:
        """Return a file or folder by name."""
        raw = unescape_name(name)
        if raw is not None:
            return self._find(raw)
        if MARK not in name:
            return None
        return next((entry for own, entry in self._children() if own == name), None)


@dataclass(frozen=True)
class FlatFolder(_KeyFolder):
    """The samples whose keys begin with `prefix`, as files `KEY.PART`."""

    prefix: str = ""

    def _find(self, raw: str) -> BrowsedEntry | None:
        folder = f"{self.prefix}{raw}/"
        if self.samples.is_nested and any(True for _ in self.samples.below(folder)):
            return FlatFolder(self.samples, folder)
        key, dot, part = raw.partition(".")
        shard_sample = self.samples.find(self.prefix + key) if dot and key else None
        return None if shard_sample is None else self.samples.parts(shard_sample).get(part)

    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]:
        folders = _folders(self.samples, self.prefix)
        for name in folders:
            yield escape_name(name), FlatFolder(self.samples, f"{self.prefix}{name}/")
        for name, shard_sample in self.samples.below(self.prefix):
            if shard_sample is None:
                continue
            mark = _mark(self.samples, shard_sample)
            for part, file in self.samples.parts(shard_sample).items():
                own = f"{name}.{part}"
                yield _named(own, mark or ("file" if own in folders else None)), file


@dataclass(frozen=True)
class SampleFolder(_KeyFolder):
    """The samples whose keys begin with `prefix`, as folders `KEY` with files `PART`."""

    prefix: str | None = ""
    """None for a sample without those whose keys are below its own."""
    shard_sample: ShardSample | None = None
    """The sample whose parts are in this folder, if there is one."""

    def _find(self, raw: str) -> BrowsedEntry | None:
        inner = self._inner(raw)
        if inner is not None:
            return inner
        return None if self.shard_sample is None else self.samples.parts(self.shard_sample).get(raw)

    def _inner(self, name: str) -> SampleFolder | None:
        """Return the folder of a sample, of the samples below it, or of both."""
        nested = self.samples.is_nested
        if self.prefix is None or (self.prefix and not nested):
            return None
        key = self.prefix + name
        shard_sample = self.samples.find(key)
        if shard_sample is None and not (
            nested and any(True for _ in self.samples.below(f"{key}/"))
        ):
            return None
        return SampleFolder(self.samples, f"{key}/", shard_sample)

    def _children(self) -> Iterator[tuple[str, BrowsedEntry]]:
        parts = {} if self.shard_sample is None else self.samples.parts(self.shard_sample)
        taken = set()
        if self.prefix is not None and (self.samples.is_nested or not self.prefix):
            folders = _folders(self.samples, self.prefix)
            for name in folders:
                key = self.prefix + name
                shard_sample = self.samples.find(key)
                yield escape_name(name), SampleFolder(self.samples, f"{key}/", shard_sample)
            for name, shard_sample in self.samples.below(self.prefix):
                if shard_sample is None:
                    continue
                mark = _mark(self.samples, shard_sample)
                taken |= {name} & parts.keys()
                if mark is not None:
                    yield _named(name, mark), SampleFolder(self.samples, None, shard_sample)
                elif name not in folders:
                    inner = SampleFolder(self.samples, f"{self.prefix}{name}/", shard_sample)
                    yield escape_name(name), inner
            taken |= folders.keys() & parts.keys()
        for part, file in parts.items():
            yield _named(part, "file" if part in taken else None), file


def _folders(samples: BrowsedSamples, prefix: str) -> dict[str, None]:
    """Return the names of folders of keys below the beginning of one, each once."""
    if not samples.is_nested:
        return {}
    return dict.fromkeys(
        name for name, shard_sample in samples.below(prefix) if shard_sample is None
    )


def _mark(samples: BrowsedSamples, shard_sample: ShardSample) -> str | None:
    """Return the suffix that distinguishes a sample from earlier ones with the same key."""
    count = samples.repeated.get(shard_sample)
    return None if count is None else str(count + 1)


def _named(name: str, mark: str | None) -> str:
    escaped = escape_name(name)
    return escaped if mark is None else mark_name(escaped, mark)


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine."""

    path: Path

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders; sockets and the like are skipped."""
        with os.scandir(self.path) as content:
            for entry in content:
                if entry.is_dir() or entry.is_file():
                    yield TreeEntry(entry.name, entry.is_dir())

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a file or folder by name."""
        if name in ("", ".", "..") or "/" in name:
            return None
        path = self.path / name
        if path.is_dir():
            return LocalFolder(path)
        try:
            status = path.stat()
            opener = partial(OpenFile, str(path))
            return BrowsedFile(opener, 0, status.st_size, status.st_mtime_ns)
        except (DatasetNotFoundError, OSError):
            return None


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in an object store, listed when someone looks at it."""

    address: EPath

    def entries(self) -> Iterator[TreeEntry]:
        """Yield files and folders."""
        return self._listed.entries()

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a file or folder by name."""
        return self._listed.find(name)

    @cached_property
    def _listed(self) -> _Listed:
        tree: dict[str, Any] = {}
        for info in list_files(self.address):
            *folders, name = info.key.split("/")
            inner = tree
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = info
        return _Listed(self.address, tree)


@dataclass(frozen=True)
class _Listed:
    """A folder whose content is known."""

    address: EPath
    tree: dict[str, Any]

    def entries(self) -> Iterator[TreeEntry]:
        for name, content in self.tree.items():
            yield TreeEntry(escape_name(name), isinstance(content, dict))

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        raw = unescape_name(name)
        content = None if raw is None else self.tree.get(raw)
        if raw is None or content is None:
            return None
        if isinstance(content, dict):
            return _Listed(self.address / raw, content)
        opener = partial(RemoteFile, (self.address / raw).url)
        return BrowsedFile(opener, 0, content.size, content.mtime_ns)


class TreeOpener:
    """Makes trees of datasets, only one for each dataset.

    Args:
        sample_folders: Whether each sample is a folder.
    """

    def __init__(self, *, sample_folders: bool = False) -> None:
        self.sample_folders = sample_folders
        self._pool = ShardPool()
        self._known: dict[str, BrowsedFolder] = {}

    def open(self, address: str | os.PathLike[str]) -> BrowsedFolder:
        """Return the tree of what is at an address.

        A metadataset is a folder for each split, containing its datasets as folders and, next to
        each as `DATASET.aux`, a folder with its auxiliary data.

        Raises:
            DatasetNotFoundError: If there is no dataset.
            ConfigError: If a document is invalid.
        """
        address = _absolute(os.fspath(address))
        if address not in self._known:
            self._known[address] = self._open(address)
        return self._known[address]

    def _open(self, address: str) -> BrowsedFolder:
        folder = folder_of(address)
        if folder is not None:
            path = any_path(folder)
            return RemoteFolder(path) if isinstance(path, EPath) else LocalFolder(path)
        kind = dataset_kind(address)
        if kind == "metadataset":
            return self._document(address)
        return kind_named(kind).browse(address, pool=self._pool, sample_folders=self.sample_folders)

    def _document(self, address: str) -> BrowsedFolder:
        splits = {}
        for name in read_metadataset(address).content.splits:
            leaves = resolve(address, split_part=name, training=False).leaves
            datasets = [each for leaf in leaves for each, _ in leaf.datasets]
            splits[escape_name(name)] = self._datasets(datasets)
        return NamedFolders(splits)

    def _datasets(self, leaves: Sequence[Leaf]) -> BrowsedFolder:
        folders: dict[str, BrowsedFolder] = {}
        paths: dict[str, str] = {}
        for leaf in leaves:
            name = first = escape_name(address_name(leaf.path))
            number = 1
            while paths.setdefault(name, leaf.path) != leaf.path:
                number += 1
                name = f"{first}#{number}"
            folders[name] = LazyFolder(self, leaf.path)
            if leaf.aux:
                folders[f"{name}.aux"] = NamedFolders(
                    {key: LazyFolder(self, path) for key, path in leaf.aux.items()}
                )
        return NamedFolders(folders)


def _absolute(address: str) -> str:
    """Return an address that stays valid when the process changes its folder, as libfuse does."""
    folder = folder_of(address)
    if folder is not None:
        return address.removesuffix(folder) + _absolute(folder)
    return address if is_remote(address) else os.path.abspath(local_path(address))


class LazyFolder:
    """A tree that is opened when someone looks at it."""

    def __init__(self, opener: TreeOpener, address: str) -> None:
        self._opener = opener
        self._address = address

    @cached_property
    def _folder(self) -> BrowsedFolder:
        return self._opener.open(self._address)

    def entries(self) -> Iterator[TreeEntry]:
        """Yield its entries."""
        return self._folder.entries()

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return the entry with this name, or None."""
        return self._folder.find(name)


logger = logging.getLogger("energon")
TOGETHER = 1000
"""Keys that are fetched from `index.sqlite` at a time."""


class ShardSample(NamedTuple):
    """A sample: the number of its shard in the list of the dataset, and its number in the shard."""

    shard: int
    sample: int


class Child(NamedTuple):
    """What is below the beginning of a key, up to the next slash."""

    name: str
    shard_sample: ShardSample | None
    """The sample that has this key; None for a folder of samples."""


class BrowsedSamples(Protocol):
    """The samples of a dataset. May be used by many threads."""

    shards: list[str]
    """Paths of the shards."""

    def find(self, key: str) -> ShardSample | None:
        """Return the first sample that has this key, or None."""

    def parts(self, shard_sample: ShardSample) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name; of two with the same name, the first."""

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`. Folders may occur repeatedly."""

    @property
    def repeated(self) -> dict[ShardSample, int]:
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

    def find(self, key: str) -> ShardSample | None:
        """Return the first sample that has this key, or None."""
        return next(self._shard_samples(key.encode("utf-8", "surrogateescape")), None)

    def parts(self, shard_sample: ShardSample) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name."""
        table = self.open(shard_sample.shard).table
        find = partial(self._file, shard_sample.shard)
        parts: dict[str, BrowsedFile] = {}
        for name, offset, size in table.sample_parts(shard_sample.sample):
            parts.setdefault(name, BrowsedFile(find, offset, size, table.shard_mtime_ns))
        return parts

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`, shard by shard."""
        for shard in self._readable:
            for name, sample in _below(self.open(shard).table, prefix):
                yield Child(name, None if sample is None else ShardSample(shard, sample))

    @cached_property
    def repeated(self) -> dict[ShardSample, int]:
        """Samples whose key an earlier one has, and how many of those there are."""
        counts: dict[ShardSample, int] = {}
        for number, sample in self._index.collisions():
            table = self.open(self._readable[number]).table
            for count, shard_sample in enumerate(self._shard_samples(table.encoded_key(sample))):
                if count:
                    counts[shard_sample] = count
        return counts

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
        readable = [shard for shard in numbers if self._can_open(shard)]
        if not readable and self.shards:
            self.open(0)
        return readable

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

    def _shard_samples(self, key: bytes) -> Iterator[ShardSample]:
        """Yield the samples that have this key, in the order of the dataset."""
        for number, sample in sorted(self._index.find(key)):
            shard = self._readable[number]
            if self.open(shard).table.encoded_key(sample) == key:
                yield ShardSample(shard, sample)


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
        self.repeated: dict[ShardSample, int] = {}  # the index has every key once

    def find(self, key: str) -> ShardSample | None:
        """Return the sample that has this key, or None."""
        try:
            row = self._readers.get().first(_FIND, (key,))
        except UnicodeEncodeError:  # bytes that are not text, which the index cannot contain
            return None
        return None if row is None else self._shard_sample(*row)

    def parts(self, shard_sample: ShardSample) -> dict[str, BrowsedFile]:
        """Return the parts of a sample by name."""
        key = self._readers.get().first(_KEY, shard_sample)
        parts: dict[str, BrowsedFile] = {}
        for (_, name), part in () if key is None else self._locator.members(key[0]):
            find = partial(self._locator.file, shard_sample.shard)
            parts.setdefault(name, BrowsedFile(find, part.offset, part.size))
        return parts

    def below(self, prefix: str) -> Iterator[Child]:
        """Yield the rests of keys that begin with `prefix`, in their order."""
        low, high = prefix, None if not prefix else _behind(prefix)
        while True:
            reader = self._readers.get()
            rows = list(reader.rows(_FROM if high is None else _RANGE, (low, high)))
            for text, *numbers in rows:
                key = reader.text(text)
                rest, slash, _ = key[len(prefix) :].partition("/")
                yield Child(rest, None if slash else self._shard_sample(*numbers))
                # What comes after a folder begins with the character that follows the slash.
                low = f"{prefix}{rest}0" if slash else key + "\0"
                if slash:
                    break
            if not rows:
                return

    def _shard_sample(self, *numbers: object) -> ShardSample:
        return ShardSample(*self._readers.get().numbers(*numbers))


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
