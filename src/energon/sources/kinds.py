"""Kinds of datasets: the contract of a kind and of its sources.

`metadataset/kind.py` recognizes the kind of a path by file names; its table, `KINDS`, names the
implementation of each. Another package adds one with an entry point of the group
`energon.dataset_kinds` that is a `KindEntry`. Code outside this room never asks which kind a
dataset is, only what the kind can do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError
from energon.formats.tables.part_table import PartTable
from energon.io.address import is_remote, redact
from energon.io.epath import AnyPath
from energon.io.range_file import RangeFile
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.kind import kind_entry
from energon.metadataset.leaf import Leaf
from energon.metadataset.recognition import dataset_kind
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool

if TYPE_CHECKING:
    from energon.sources.browse.tree import BrowsedFolder, Contents
    from energon.sources.files.store import FileStore


class Location(NamedTuple):
    """The location of a sample, for messages, sources and caches."""

    key: str
    shard: str
    sample: int
    """Number of the sample within its shard."""
    offset: int
    """Its offset in the shard, in bytes."""
    parts: tuple[str, ...]


class Extents(NamedTuple):
    """Where samples of one shard are."""

    file: RangeFile
    places: Ints
    """Which of the requested samples these are."""
    low: Ints
    """The first byte needed of each."""
    high: Ints
    """The byte after the last one needed of each."""


def selected_extents(
    table: PartTable, indices: Ints, parts: Container[str] | None
) -> tuple[Ints, Ints]:
    """Return the range in which to read samples of a shard.

    Args:
        table: Part table of the shard.
        indices: Numbers of samples in it.
        parts: Names of the parts to read; None for all.
    """
    names = table.common_parts
    if names is not None:
        selected = [at for at, name in enumerate(names) if parts is None or name in parts]
        if selected:
            numbers = indices[:, None] * len(names) + np.array(selected)
            begin, size = table.extents(numbers)
            return begin.min(axis=1), (begin + size).max(axis=1)
    # Samples with different parts are read with everything they contain.
    return table.sample_extents(indices)


class Source(Protocol):
    """The samples of a dataset, numbered from 0. Pickled copies open their files again."""

    @property
    def path(self) -> AnyPath:
        """Path or address of the dataset."""

    @property
    def paths(self) -> list[AnyPath]:
        """The same as a list; for a join, the paths of all its datasets."""

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store, so that read-ahead pays off."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the samples and their order, which a saved state must match."""

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> list[CrudeSample]:
        """Return samples as dicts of bytes, in the order of `ordinals`.

        Sources that set `reads_values = True` return an `UnreadableSample` where a part cannot be
        read, so that only this sample fails.

        Args:
            ordinals: Their numbers, shape (count,).
            restore_keys: The `__restore_key__` of each; None for their numbers.
            subflavors: The `__subflavors__` of all.
        """

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where samples are, for read-ahead."""

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is; for a join, where that of its first dataset is."""

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        """Return the sources that a sample consists of, with its number in each."""

    def keys(self, ordinals: Ints) -> list[str]:
        """Return the keys of samples, in the order of `ordinals`, for joins."""

    def find(self, key: str) -> list[int]:
        """Return the numbers of the samples with a key. Slow: for tools."""

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        """Return what two sources with common samples share, and which part of it this one has.

        Returns:
            Names of the place where the samples are, and for each file there the numbers of the
            first sample and the one after the last.
        """


def restore_keys_of(
    ordinals: Ints, given: Sequence[tuple[int, ...]] | None
) -> Sequence[tuple[int, ...]]:
    """Return the restore keys of samples: those given, or else their numbers."""
    return list(zip(ordinals.tolist())) if given is None else given


class SingleSource:
    """The answers common to all sources of a single dataset.

    Attributes:
        path: Path or address of the dataset.
        start: The first of its samples, and
        stop: the one after the last.
    """

    path: AnyPath
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def paths(self) -> list[AnyPath]:
        """Where the dataset is, in a list of one."""
        return [self.path]

    @cached_property
    def is_remote(self) -> bool:
        """Whether it is in an object store."""
        return is_remote(self.path)

    def keys(self, ordinals: Ints) -> list[str]:
        """Return the keys of samples. Slow: override it if keys can be told without places."""
        return [cast("Source", self).locate(ordinal).key for ordinal in ordinals.tolist()]

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        """Return the source itself: a sample consists of nothing else."""
        return [(cast("Source", self), ordinal)]


class SplitSource(SingleSource):
    """A source that reads a split, in which samples may be excluded.

    Attributes:
        split_part: The split.
        excluded: The places of excluded samples in it, ascending; the others are numbered.
        places: The first place in the split that belongs to the subset, and the one after the
            last. Excluded samples have a place, so that excluding one never moves the others to
            another subset.
    """

    split_part: str
    excluded: Ints
    places: tuple[int, int]

    @cached_property
    def unexcluded(self) -> tuple[Source, Ints]:
        """The source with all samples of the subset, and the numbers of the excluded ones in it."""
        if not len(self.excluded):
            return cast("Source", self), self.excluded
        return cast("Source", self._unexcluded_copy()), self._in_subset(self.excluded)

    def _unexcluded_copy(self) -> Self:
        source = copy(self)
        source.excluded = np.empty(0, np.int64)
        source.start, source.stop = self.places
        return source

    def _in_subset(self, places: Ints) -> Ints:
        """Return the numbers of some places of the split in the subset, without those outside."""
        low, high = self.places
        return places[(places >= low) & (places < high)] - low


class DatasetKind:
    """The operations on datasets of one kind. A kind supports only what it overrides.

    Attributes:
        name: Its name in documents and reports.
        noun: What a dataset of the kind is, for messages: "a folder of files".
        has_files: Whether it has files of its own, whose media `prepare` can record.
        options: What a document may set under `read` for a dataset: names, which are then in
            `Leaf.read`, with values that `open` checks.
        prepares: Whether `prepare` is all that preparing takes; False for folders that commands
            index.
        hint: What users who examine or prepare such a dataset should know; "" for nothing.
    """

    name: str
    noun: str
    has_files = False
    options: tuple[str, ...] = ()
    prepares = True
    hint = ""

    def prepare(self, address: str) -> int:
        """Check the dataset, write what makes opening it fast, and return its number of samples.

        Here, there is nothing to write, and opening it is the check.
        """
        return int(self.describe(address, parts=False)["samples"])

    def check_options(self, leaf: Leaf) -> None:
        """Raise ConfigError if a document sets anything under `read` that is not an option."""
        for name in leaf.read:
            if name not in self.options:
                from difflib import get_close_matches

                close = get_close_matches(str(name), self.options, 1)
                known = f"its options are {', '.join(self.options)}" if self.options else "has none"
                hint = f"did you mean {close[0]!r}?" if close else known
                raise ConfigError(
                    f"{leaf.origin}: read: {name!r} is not an option of {self.noun}; {hint}"
                )

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        """Return the names of its splits.

        Args:
            address: Path or address of the dataset.
            split_config: File below `.nv-meta` that lists them; None for split.yaml.
            allow: What the data may do, see `get_train_dataset`.
        """
        return []

    def config(self, leaf: Leaf) -> DatasetConfig:
        """Return the configuration of its samples: by default, they are left to cookers."""
        return DatasetConfig(origin=leaf.path)

    def open(
        self,
        leaf: Leaf,
        config: DatasetConfig,
        *,
        exclude: Sequence[str] = (),
        parts: Collection[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> Source:
        """Return the samples that a leaf refers to.

        Args:
            leaf: What a document says: the path, the split, the subset.
            config: What the dataset says itself.
            exclude: Keys to exclude in addition to those of the splits.
            parts: Which parts of the samples to read; None reads all.
            pool: Opens the files of all datasets of a run; None makes a pool.
            allow: What the data may do, see `get_train_dataset`.
        """
        raise self.refusal(leaf.path, "read sample by sample")

    def unmatched(self, leaf: Leaf) -> list[str]:
        """Describe which entries of a dataset's exclude lists match nothing."""
        return []

    def lists_nothing(self, leaf: Leaf) -> bool:
        """Return whether the split of a leaf is intentionally empty, not by a loss of samples."""
        return False

    def check_field_map(self, source: Any, field_map: FieldMap) -> None:
        """Raise ConfigError if a field map names parts that no sample of `source` has.

        Kinds that cannot tell without reading all samples leave it to the hooks.
        """

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        """Return its files by name, for cookers and as auxiliary data: here, parts of samples.

        Args:
            address: Path or address of the dataset.
            pool: Opens the files of all datasets of a run; None makes a pool.
            allow: What the data may do, see `get_train_dataset`.
        """
        from energon.sources.files.samples import SampleFileStore

        return SampleFileStore(self, address, pool=pool, allow=allow)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        """Return the dataset as a tree of files, for `energon mount`."""
        raise self.refusal(address, "shown as files")

    def contents(self, source: Any) -> Contents:
        """Return what is where in a source that `open` has returned, for `energon view`.

        The operations of every source are sufficient; a kind that knows where parts are can open
        them without reading samples.
        """
        from energon.sources.browse.tree import Contents

        return Contents(source)

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        """Return its contents as plain data, for `energon info`.

        `samples` is their number; `splits` has a dict for each, which may have `samples`, `shards`
        and `excluded`. Sizes in `bytes`, and further facts, are optional.
        """
        raise self.refusal(address, "described")

    def refusal(self, address: str, what: str) -> ConfigError:
        """Return the error for an operation that this kind does not support."""
        return ConfigError(f"{redact(address)} is {self.noun}, which cannot be {what}")


def split_description(samples: int, shards: int, *, excluded: int = 0) -> dict[str, int]:
    """Return what `DatasetKind.describe` says about a split."""
    return {"samples": samples, "shards": shards, "excluded": excluded}


def description(
    samples: int,
    shards: int,
    num_bytes: int,
    splits: Mapping[str, Mapping[str, int]],
    *,
    sample_type: str = "CrudeSample",
) -> dict[str, Any]:
    """Return what `DatasetKind.describe` says about a dataset that has no index of its shards."""
    return {
        "sample_type": sample_type,
        "samples": samples,
        "shards": shards,
        "bytes": num_bytes,
        "missing_shards": [],
        "energon_version": None,
        "splits": splits,
    }


def kind_of(address: str | os.PathLike[str]) -> DatasetKind:
    """Return the kind of the dataset at an address.

    Raises:
        DatasetNotFoundError: If there is nothing that can be loaded.
        ConfigError: If it is a metadataset, which is not a dataset itself.
        StorageError: If it is remote and cannot be reached.
    """
    return kind_named(dataset_kind(address), os.fspath(address))


def kind_named(name: str, address: str = "") -> DatasetKind:
    """Return the kind of this name.

    Args:
        name: The result of `dataset_kind`.
        address: The dataset, for messages.
    """
    home = kind_entry(name).home
    if not home:
        raise ConfigError(f"{redact(address)} is a {name}, not a dataset")
    module, _, attribute = home.partition(":")
    kind: DatasetKind = getattr(import_module(module), attribute)
    return kind


def content_fingerprint(num_samples: int, content: Any) -> dict[str, Any]:
    """Return the number of samples, and a digest of the JSON value that determines them."""
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
    return {"samples": num_samples, "index": digest}
