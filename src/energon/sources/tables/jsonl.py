"""Read the samples of a JSONL file by ordinal."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, EmptyDatasetError
from energon.formats.meta.jsonl import (
    PART,
    JsonlSplit,
    describe_unmatched_lines,
    jsonl_split_path,
    parse_jsonl_split,
)
from energon.formats.meta.split import numbers_in
from energon.io.address import address_name
from energon.io.epath import AnyPath, any_path
from energon.local_file import decode_utf8
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.subset import resolve_range
from energon.samples.crude import CrudeSample
from energon.sources.browse.tree import BrowsedFile, BrowsedFolder, Contents
from energon.sources.decoded_blocks import SliceCost
from energon.sources.files.store import FileStore
from energon.sources.kinds import (
    DatasetKind,
    description,
    split_description,
)
from energon.sources.numbered import NumberedSource
from energon.sources.part_statistics import PartStatistics, SizeStatistics
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool
from energon.sources.source import (
    Extents,
    Location,
    content_fingerprint,
    restore_keys_of,
)
from energon.sources.tables.jsonl_lines import JsonlFile, JsonlFileStore, LinesFolder
from energon.sources.tables.unpacked_file import UnpackedFile
from energon.sources.webdataset import warn_unmatched


class JsonlSource(NumberedSource):
    """The samples of a split of a JSONL file, numbered from 0.

    A sample has the part `json`, in bytes. Its key is the number of the line in the file.

    Args:
        path: The file.
        split_part: The split to read.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys to exclude in addition to those of the splits; `x.jsonl/17` is accepted, too.

    Raises:
        DatasetNotFoundError: If the file is missing or not indexed.
        ConfigError: If there is no such split.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split_part: str = "train",
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        self.lines = JsonlFile(path)
        where = self.lines.path
        split = _splits(where)
        excluded = [*split.exclude, *exclude]
        warn_unmatched(
            where, describe_unmatched_lines(excluded, address_name(where), len(self.lines))
        )
        super().__init__(
            where,
            split_part=split_part,
            bounds=_range(split, split_part, len(self.lines)),
            subsets=subsets,
            exclude=excluded,
        )

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a line in bytes."""
        return float(self.lines.offsets[-1]) / len(self.lines)

    @property
    def slice_cost(self) -> SliceCost | None:
        """What is unpacked together; None if the file is not compressed."""
        if not isinstance(self.lines.file, UnpackedFile):
            return None
        size = self.lines.file.mean_interval
        # A slice is not aligned with points, so it spans up to three intervals.
        return SliceCost(max(1, int(size / self.mean_sample_bytes)), int(3 * size))

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the samples and their order, which a saved state must match."""
        content = {
            "lines": [len(self.lines), int(self.lines.offsets[-1])],
            "excluded": self.excluded.tolist(),
            "range": [self.first, self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> list[CrudeSample]:
        """Return samples, in the order of `ordinals`; see `WebdatasetSource.read`."""
        numbers = self.numbers(ordinals)
        order = np.argsort(numbers, kind="stable")
        lines = self.lines.read(numbers[order])
        keys = restore_keys_of(ordinals, restore_keys)
        shard = address_name(self.path)
        samples: list[Any] = [None] * len(lines)
        for place, line in zip(order.tolist(), lines, strict=True):
            samples[place] = CrudeSample(
                {
                    "__key__": str(numbers[place]),
                    "__shard__": shard,
                    "__restore_key__": keys[place],
                    "__subflavors__": subflavors,
                    PART: line,
                }
            )
        return samples

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples are."""
        numbers = self.numbers(ordinals)
        order = np.argsort(numbers, kind="stable")
        file = self.lines.file
        low, high = self.lines.extents(numbers[order])
        if isinstance(file, UnpackedFile):
            yield Extents(file.packed, order, *file.packed_extents(low, high))
        else:
            yield Extents(file, order, low, high)

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is."""
        number = int(self.numbers(np.array([ordinal]))[0])
        return Location(
            key=str(number),
            shard=address_name(self.path),
            sample=number,
            offset=int(self.lines.offsets[number]),
            parts=(PART,),
        )

    def keys(self, ordinals: Ints) -> list[str]:
        return list(map(str, self.numbers(ordinals).tolist()))

    def numbers_of(self, key: str) -> Sequence[int]:
        return numbers_in(key.removeprefix(f"{address_name(self.path)}/"))

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        return ("lines", str(self.path)), {"": self.edges()}

    def _why_empty(self) -> str:
        return (
            f"split {self.split_part!r} has no samples: lines {self.first} to {self.last} of "
            f"{len(self.lines)}, {len(self.excluded)} of them excluded, subset [{self.start}, "
            f"{self.stop})"
        )


def jsonl_splits(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the splits of a JSONL file; without a file of splits, "train"."""
    return list(_splits(any_path(path)).split_parts or ["train"])


def _splits(path: AnyPath) -> JsonlSplit:
    file = any_path(jsonl_split_path(os.fspath(path)))
    text = decode_utf8(file.read_bytes(), origin=str(file)) if file.is_file() else None
    return parse_jsonl_split(text, origin=str(file))


def _range(split: JsonlSplit, split_part: str, num_lines: int) -> tuple[int, int]:
    try:
        return resolve_range(num_lines, [split.bounds(split_part)])
    except ConfigError as error:
        raise ConfigError(f"{split.origin}: split {split_part!r}: {error}") from error


class LineContents(Contents):
    """The lines of a JSONL file."""

    def __init__(self, source: JsonlSource) -> None:
        super().__init__(source)
        self._source = source

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        where = self._source.locate(ordinal)
        return {where.parts[0]: self._source.lines.browsed(where.sample)}


class JsonlKind(DatasetKind):
    """JSONL files: a JSON object in each line."""

    name = "jsonl"
    noun = "a JSONL file"
    has_files = True

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        return jsonl_splits(address)

    def open(
        self,
        leaf: Leaf,
        config: DatasetConfig,
        *,
        exclude: Sequence[str] = (),
        parts: Collection[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> JsonlSource:
        return JsonlSource(
            leaf.path, split_part=leaf.split_part, subsets=leaf.subsets, exclude=exclude
        )

    def unmatched(self, leaf: Leaf) -> list[str]:
        lines = JsonlFile(leaf.path)
        return _splits(lines.path).unmatched(address_name(lines.path), len(lines))

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        return JsonlFileStore(address)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:

        return LinesFolder(JsonlFile(address))

    def contents(self, source: JsonlSource) -> Contents:
        return LineContents(source)

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        lines = JsonlFile(address)
        splits = {}
        for name in jsonl_splits(address):
            try:
                source = JsonlSource(address, split_part=name)
            except EmptyDatasetError:
                splits[name] = split_description(0, 0)
            else:
                excluded = len(source.excluded)
                splits[name] = split_description(len(source), 1, excluded=excluded)
        about = description(len(lines), 1, lines.size, splits)
        if parts:
            sizes = SizeStatistics()
            sizes.add(np.diff(lines.offsets))
            about |= PartStatistics(sizes, {PART: sizes}).to_json()
        return about


KIND = JsonlKind()
