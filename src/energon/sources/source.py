"""The contract of sources, which have the samples of a dataset, and what all of them share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, cast, runtime_checkable

import numpy as np

from energon.arrays import Ints
from energon.formats.tables.part_table import PartTable
from energon.io.address import is_remote
from energon.io.epath import AnyPath
from energon.io.range_file import RangeFile
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool
from energon.stages.lane import Block

Submit = Callable[..., Future[Any]]
"""Run a function with some arguments in another thread."""


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
    requested: Ints
    """Which of the requested samples these are."""
    low: Ints
    """The first byte needed of each."""
    high: Ints
    """The byte after the last one needed of each."""


class FileSamples(NamedTuple):
    """The samples that a source has of a file of its dataset, excluded ones among them."""

    name: str
    num_samples: int
    """Samples of the file."""
    first: int
    """The first sample in the file that is one of the source, and"""
    stop: int
    """the one after the last."""


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


@dataclass(frozen=True)
class OpenRequest:
    """A dataset to open.

    Args:
        leaf: Its entry in a document: the path, the split, the subset.
        config: Its own configuration.
        exclude: Keys to exclude in addition to those of the splits.
        pool: Opens the files of all datasets of a run; None makes a pool.
        allow: What the data may do, see `get_train_dataset`.
    """

    leaf: Leaf
    config: DatasetConfig
    exclude: Sequence[str] = ()
    pool: ShardPool | None = None
    allow: Collection[str] = ()


@dataclass(frozen=True)
class SampleSelection:
    """Which samples of a dataset a source has, and which parts of them it reads.

    Args:
        split_part: The split to read.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys of excluded samples, or names of files, besides those that the dataset lists.
        parts: The parts to read, unless options of the dataset name them; None for all.
    """

    split_part: str = "train"
    subsets: Sequence[Any] = ()
    exclude: Sequence[str] = ()
    parts: Collection[str] | PartFilter | None = None

    @classmethod
    def of(
        cls, request: OpenRequest, parts: Collection[str] | PartFilter | None
    ) -> SampleSelection:
        """Return the selection of a leaf."""
        return cls(request.leaf.split_part, request.leaf.subsets, request.exclude, parts)


TRAIN_SPLIT = SampleSelection()


class Source(Protocol):
    """The samples of a dataset, numbered from 0. Pickled copies open their files again."""

    @property
    def path(self) -> AnyPath:
        """Path or address of the dataset."""

    @property
    def paths(self) -> list[AnyPath]:
        """The path as a list; for a join, the paths of all its datasets."""

    @property
    def is_remote(self) -> bool:
        """Whether it is in an object store, so that read-ahead pays off."""

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in bytes."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> Block:
        """Return samples in the order of `ordinals`, each of which is made when it is taken.

        A source that makes all of them at once returns a `BuiltBlock`. A sample with a part that
        cannot be read is an `UnreadableSample`, so that it fails alone.

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
        """Return the data that sources with common samples share, and the range of this one.

        Returns:
            Names that tell where the samples are, and for each file there the numbers of the
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
        """Return the keys of samples. Slow: override it if keys can be told without locations."""
        return [cast("Source", self).locate(ordinal).key for ordinal in ordinals.tolist()]

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        """Return the source itself: a sample consists of nothing else."""
        return [(cast("Source", self), ordinal)]


class SplitSource(SingleSource):
    """A source that reads a split, in which samples may be excluded.

    Attributes:
        split_part: The split.
        excluded: The indices of excluded samples in it, ascending; the others are numbered.
        split_range: The first index in the split that belongs to the subset, and the one after
            the last. Excluded samples have an index, so that excluding one never moves the others
            to another subset.
    """

    split_part: str
    excluded: Ints
    split_range: tuple[int, int]

    @cached_property
    def unexcluded(self) -> tuple[Source, Ints]:
        """The source with all samples of the subset, and the numbers of the excluded ones in it."""
        if not len(self.excluded):
            return cast("Source", self), self.excluded
        return cast("Source", self._unexcluded_copy()), self._in_subset(self.excluded)

    def _unexcluded_copy(self) -> Self:
        source = copy(self)
        source.excluded = np.empty(0, np.int64)
        source.start, source.stop = self.split_range
        return source

    def _in_subset(self, split_indices: Ints) -> Ints:
        """Return the numbers of some indices of the split in the subset, without those outside."""
        low, high = self.split_range
        return split_indices[(split_indices >= low) & (split_indices < high)] - low


def content_fingerprint(num_samples: int, content: Any) -> dict[str, Any]:
    """Return the number of samples, and a digest of the JSON value that determines them."""
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
    return {"samples": num_samples, "index": digest}


@runtime_checkable
class DecodesAhead(Protocol):
    """A source whose samples are in blocks that are decoded as a whole."""

    def decode_ahead(self, ordinals: Ints, submit: Submit, *, max_bytes: int) -> None:
        """Begin to decode the blocks that samples are in, unless they are decoded already.

        Args:
            ordinals: The samples that are read next.
            submit: Runs what decodes a block.
            max_bytes: Memory for the blocks; those that exceed it are decoded when they are read.
        """
