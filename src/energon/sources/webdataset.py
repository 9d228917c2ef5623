"""Read samples of a prepared WebDataset by ordinal, many at a time.

The part table of a shard says where the content of every part is, so no tar headers are parsed.
Samples that are close together are read with one call, large parts with one each.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, islice, pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints, distinct
from energon.decode.sample_decoder import is_media
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EmptyDatasetError,
    NoSuchFileError,
    ObjectChangedError,
)
from energon.formats.meta.info import META, Split, load_info, load_split
from energon.io.address import is_remote
from energon.io.epath import AnyPath, any_path
from energon.messages import counted, shell_word, warn_once
from energon.plan.leaves.subset import exclude_indices, include_ordinals, resolve_range
from energon.samples.crude import CrudeSample
from energon.sources.shard_samples import (
    PartFilter,
    PartNames,
    ReadRows,
    in_order,
    read_shards,
)
from energon.sources.shards import OpenShard, ShardPool
from energon.sources.source import (
    TRAIN_SPLIT,
    Extents,
    FileSamples,
    Location,
    SampleSelection,
    Source,
    SplitSource,
    content_fingerprint,
    restore_keys_of,
    selected_extents,
)
from energon.stages.lane import Block, BuiltBlock

if TYPE_CHECKING:
    from energon.sources.files.locate import MediaLookup

logger = logging.getLogger("energon")

MEAN_SIZE_SHARDS = 8
"""How many shards are asked for their size to estimate that of samples."""


MEDIA_MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "pixels": lambda of: float(
        of.get("width", of.get("video_width", 0)) * of.get("height", of.get("video_height", 0))
    ),
    "frames": lambda of: float(of.get("video_num_frames", 0)),
    "seconds": lambda of: float(of.get("video_duration", of.get("audio_duration", 0))),
}
"""Measures of media files, by the kind in their names, from the fields of media metadata."""


class WebdatasetSource(SplitSource):
    """The samples of a split, or of a subset of it, numbered from 0 across all its shards.

    Excluded samples have no number. Opening reads the `.nv-meta` files; shards and their
    tables are opened when they are first read. Pickled copies open them again.

    Args:
        path: Folder of the prepared dataset.
        selection: Which samples to read, and which parts of them.
        split_config: File below `.nv-meta` that lists the splits.
        pool: Opens shards; sources that are used together share one. None makes a pool.
        allow: "outside" permits shards outside of the folder.

    Raises:
        DatasetNotFoundError: If there is no prepared dataset.
        SecurityError: If the dataset needs something that is not allowed.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        *,
        split_config: str = "split.yaml",
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self.path = any_path(path)
        self.is_remote = is_remote(self.path)  # known before lanes ask for it
        self.split_part = selection.split_part
        parts = selection.parts
        self.parts = parts if parts is None or isinstance(parts, PartFilter) else PartNames(parts)
        counts = load_info(self.path, allow).shard_counts
        split = load_split(self.path, split_config, allow)
        split = replace(split, exclude=[*split.exclude, *selection.exclude])
        warn_unmatched(self.path, split.unmatched(counts))
        listed, kept = self._shards_of(split, counts)
        self._listed = _Layout.of(split, self.split_part, listed, counts)
        self._is_kept = np.array([shard in kept for shard in listed], bool)
        self._lay_out(self._listed.only(self._is_kept))
        self._pool = ShardPool() if pool is None else pool
        self._mean_sample_bytes: float | None = None
        self.excluded = self._find_excluded(split.excluded_samples)
        self._range = resolve_range(int(self._listed.bounds[-1]), selection.subsets)
        low, high = self._listed.before(np.array(self._range), self._is_kept).tolist()
        self.split_range = low, high
        self.start, self.stop = exclude_indices(np.array(self.split_range), self.excluded).tolist()
        if self.start >= self.stop:
            raise EmptyDatasetError(
                f"{self.path}: split {self.split_part!r} has no samples: "
                f"{counted(len(self.shards), 'shard')} with {counted(self.bounds[-1], 'sample')}, "
                f"{len(self.excluded)} of them excluded, subset [{self.start}, {self.stop}); list "
                f"shards in .nv-meta/{split_config}, or remove the dataset"
            )

    def _shards_of(
        self, split: Split, counts: Mapping[str, int]
    ) -> tuple[list[str], Collection[str]]:
        """Return the shards of the split that are in the index, and which of them to read."""
        shards = split.shards(self.split_part)
        listed = replace(split, exclude=()).shards(self.split_part) if split.exclude else shards
        if listed and not shards:
            raise EmptyDatasetError(
                f"{self.path}: split {self.split_part!r} has no samples: "
                f"{counted(len(listed), 'shard')}, all excluded; correct `exclude` in "
                f"{split.origin}, or what exclude_from lists"
            )
        unknown = [shard for shard in shards if shard not in counts]
        if unknown:
            raise DatasetNotFoundError(
                f"{self.path}: split {self.split_part!r} lists {unknown[0]!r}, which is not in the "
                f"index ({counted(len(unknown), 'such shard')}); run `energon prepare "
                f"{shell_word(self.path)}`"
            )
        return [shard for shard in listed if shard in counts], set(shards)

    def _lay_out(self, layout: _Layout) -> None:
        """Use some of the listed shards, one after another."""
        self.shards, self._counts = layout.shards, layout.counts
        self.firsts, self.bounds = layout.firsts, layout.bounds
        self._paths: dict[int, str] = {}

    def _unexcluded_copy(self) -> Self:
        """Return a copy with the excluded shards, too, but for those that cannot be opened."""
        source = copy(self)
        source._lay_out(self._listed)
        source.excluded = np.empty(0, np.int64)
        is_there = self._is_kept.copy()
        lost = np.flatnonzero(~is_there)
        is_there[lost] = [each is not None for each in source.open_shards(lost.tolist())]
        source._lay_out(self._listed.only(is_there))
        low, high = self._listed.before(np.array(self._range), is_there).tolist()
        source.split_range = source.start, source.stop = low, high
        return source

    @cached_property
    def unexcluded(self) -> tuple[Source, Ints]:
        """The source with all samples of the subset, and the numbers of the excluded ones in it."""
        if self._is_kept.all() and not len(self.excluded):
            return self, self.excluded
        whole = self._unexcluded_copy()
        kept = set(self.shards)
        shards, indices = self._indices(self.excluded)
        number = np.flatnonzero([shard in kept for shard in whole.shards])
        ranges = zip(whole.shards, pairwise(whole.bounds.tolist()), strict=True)
        others = [np.arange(*edges) for shard, edges in ranges if shard not in kept]
        own = whole.bounds[number[shards]] + indices - self.firsts[shards]
        return whole, whole._in_subset(np.sort(np.concatenate([own, *others])))

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in its tar file, in bytes, estimated from a few shards."""
        # Not a `cached_property`, which lets the threads of all sources wait for each other.
        if self._mean_sample_bytes is None:
            self._mean_sample_bytes = self._estimate_sample_bytes()
        return self._mean_sample_bytes

    def _estimate_sample_bytes(self) -> float:
        spread = np.linspace(0, len(self.shards) - 1, MEAN_SIZE_SHARDS).astype(int)
        chosen: list[int] = distinct(spread).tolist()
        try:
            sizes = self._pool.sizes([self._shard_path(shard) for shard in chosen])
        except DatasetNotFoundError as error:
            raise DatasetNotFoundError(
                f"{error}, but the dataset lists it; restore it, or run `energon prepare "
                f"{shell_word(self.path)}` again without it"
            ) from error
        return sum(sizes) / max(1, sum(self._counts[shard] for shard in chosen))

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        content = {
            "shards": dict(zip(self.shards, np.diff(self.bounds).tolist(), strict=True)),
            "excluded": self.excluded.tolist(),
            "range": [self.start, self.stop],
        }
        if self.firsts.any():
            content["firsts"] = self.firsts.tolist()
        return content_fingerprint(len(self), content)

    def read(
        self,
        ordinals: Ints,
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> Block:
        """Return samples, in the order of `ordinals`, as dicts that are made when they are taken.

        Args:
            ordinals: Numbers of samples, in any order.
            restore_keys: The `__restore_key__` of each; None for its ordinal.
            subflavors: The `__subflavors__` of all.

        Raises:
            IndexError: If there is no such sample.
            DatasetNotFoundError: If a shard is missing.
            TruncatedError: If a shard ends too early.
            ShardChangedError: If a shard is not the one that was indexed.
        """
        keys = restore_keys_of(ordinals, restore_keys)
        order, shards, groups = self._read_shards(ordinals)
        first = list(islice(groups, 2))
        if len(first) != 1:
            groups = chain(first, groups)
            return BuiltBlock(self._rows(order, shards, groups, keys, subflavors))
        ((requested, rows),) = first
        back = np.empty_like(order)
        back[order[requested]] = np.arange(len(order))
        names = in_order(self.shards, shards[requested[back]])
        return rows.lazy((names, keys, [subflavors] * len(order)), back)

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where samples are, shard by shard.

        Shards that are not open yet are opened together, so that waiting for a remote store does
        not add up. Shards that cannot be opened are skipped.
        """
        shards, indices = self._indices(split_indices_of(self, ordinals))
        numbers = distinct(shards).tolist()
        for shard, opened in zip(numbers, self.open_shards(numbers), strict=True):
            if opened is None:
                continue
            requested = np.flatnonzero(shards == shard)
            low, high = selected_extents(opened.table, indices[requested], self.parts)
            yield Extents(opened.file, requested, low, high)

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return a measure of samples, which the index has; None if there is none.

        It is `bytes`, the size of samples in their shards, `NAME:bytes`, that of a part, or
        `NAME:pixels` and others of `MEDIA_MEASURES`, which `energon prepare-media` has recorded;
        0 for samples without the part.
        """
        part, joint, kind = name.rpartition(":")
        if bool(part) != bool(joint) or (kind != "bytes" and not (part and kind in MEDIA_MEASURES)):
            return None
        values = np.empty(len(ordinals))
        shards, indices = self._indices(split_indices_of(self, ordinals))
        numbers = distinct(shards).tolist()
        together = self.open_shards(numbers) if self.is_remote else [None] * len(numbers)
        for shard, opened in zip(numbers, together, strict=True):
            table = (opened or self.open_shard(shard)).table
            chosen = shards == shard
            own = indices[chosen]
            if kind != "bytes":
                sizes = table.part_bytes(part, own)
                values[chosen] = [
                    self._medium(f"{key}.{part}", kind) if size else 0.0
                    for key, size in zip(table.keys(own), sizes.tolist(), strict=True)
                ]
            elif part:
                values[chosen] = table.part_bytes(part, own)
            else:
                begin, end = table.sample_extents(own)
                values[chosen] = end - begin
        return values

    def _medium(self, file: str, kind: str) -> float:
        """Return a measure of a media file; 0 if it does not apply to such files."""
        return MEDIA_MEASURES[kind](self._media.get(file).to_dict())

    @cached_property
    def _media(self) -> MediaLookup:
        from energon.sources.files.locate import MediaLookup  # most runs read no media metadata

        return MediaLookup(self.path)

    def measure_names(self) -> list[str]:
        """Return the names of the measures of the first sample."""
        parts = self.locate(0).parts
        names = ["bytes", *(f"{name}:bytes" for name in parts)]
        media = [name for name in parts if is_media(name)]
        if media and self._has_media():
            names += [f"{name}:{kind}" for name in media for kind in MEDIA_MEASURES]
        return names

    def _has_media(self) -> bool:
        """Return whether `energon prepare-media` has recorded media metadata."""
        try:
            self._media.get("")
        except ConfigError:
            return False
        except NoSuchFileError:
            pass
        return True

    def file_samples(self) -> list[FileSamples]:
        """Return the shards, and which of their samples the split has."""
        ranges = self.ranges()[1]
        return [
            FileSamples(shard, count, *ranges.get(shard, (0, 0)))
            for shard, count in zip(self.shards, self._counts, strict=True)
        ]

    def in_files(self, ordinals: Ints) -> tuple[Ints, Ints]:
        """Return the number of the shard of each sample, and that of the sample in its shard."""
        return self._indices(split_indices_of(self, ordinals))

    def index_stamp(self) -> str | None:
        """Return the identifier that is replaced whenever the index changes."""
        file = self.path / META / "index.uuid"
        return file.read_text().strip() if file.is_file() else None

    def file_stamp(self, number: int) -> str:
        """Return size and date of a shard when it was indexed, and a digest of its samples."""
        table = self.open_shard(number).table
        edges = zlib.crc32(table.sample_offset.tobytes())
        return f"{table.shard_size}-{table.shard_mtime_ns}-{edges:08x}"

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is."""
        shard, index = self._index(ordinal)
        table = self.open_shard(shard).table
        return Location(
            key=table.key_of(index),
            shard=self.shards[shard],
            sample=index,
            offset=table.sample_extent(index)[0],
            parts=tuple(name for name, _, _ in table.sample_parts(index)),
        )

    def find(self, key: str) -> list[int]:
        ordinals = []
        for shard in range(len(self.shards)):
            sample = self.open_shard(shard).table.index_of(key)
            if sample is not None:
                ordinals += self.ordinals_of(shard, sample)
        return ordinals

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        edges = np.array([self.start, self.stop - 1])
        low, high = include_ordinals(edges, self.excluded).tolist()
        starts, stops = self.bounds[:-1], self.bounds[1:]
        read = (starts <= high) & (low < stops)
        shift = (self.firsts - starts)[read]
        first = np.maximum(starts[read], low) + shift
        stop = np.minimum(stops[read], high + 1) + shift
        ranges = zip(first.tolist(), stop.tolist(), strict=True)
        return ("shards", str(self.path)), dict(
            zip(compress(self.shards, read), ranges, strict=True)
        )

    def shard_of(self, ordinal: int) -> str:
        """Return the shard of a sample, without opening it."""
        shard, _ = self._index(ordinal)
        return self.shards[shard]

    def ordinals_of(self, shard: int, index: int) -> list[int]:
        """Return the number of a sample of a shard, as a list of one; empty if it is left out."""
        split_index = self._split_index(shard, index)
        return [] if split_index is None else included(self, split_index)

    def open_shard(self, shard: int) -> OpenShard:
        """Return one of `shards`, open."""
        path = self._shard_path(shard)
        return self._pool.open(path, num_samples=self._counts[shard], dataset=self.path)

    def open_shards(self, shards: Sequence[int]) -> list[OpenShard | None]:
        """Return shards, opened several at a time; None for those that cannot be opened."""
        return self._pool.open_together(self.open_shard, shards)

    def _read_shards(self, ordinals: Ints) -> tuple[Ints, Ints, Iterator[tuple[Ints, ReadRows]]]:
        """Return samples in the order of their shards.

        Returns:
            The indices in `ordinals` of all samples in that order, their shards, and an iterator
            of the samples, each time with their indices in that order.
        """
        split_indices = split_indices_of(self, ordinals)
        order = np.argsort(split_indices, kind="stable")
        shards, indices = self._indices(split_indices[order])
        return order, shards, self._read_in_rounds(shards, indices)

    def _read_in_rounds(self, shards: Ints, indices: Ints) -> Iterator[tuple[Ints, ReadRows]]:
        """Yield samples of ascending shards, in rounds of as many shards as the pool keeps open.

        Samples whose buffers are not yet read keep the files of their shards open.
        """
        counts = np.bincount(shards)
        numbers = np.flatnonzero(counts)
        runs = list(zip(numbers.tolist(), counts[numbers].tolist(), strict=True))
        stop = 0
        for first in range(0, len(runs), self._pool.max_open):
            some = runs[first : first + self._pool.max_open]
            start, stop = stop, stop + sum([count for _, count in some])
            for requested, rows in self._read_together(some, indices[start:stop]):
                yield start + requested, rows

    def _read_together(
        self, runs: Sequence[tuple[int, int]], indices: Ints
    ) -> list[tuple[Ints, ReadRows]]:
        """Return samples of some shards, each with how many are its own; see `read_shards`."""

        def read() -> list[tuple[Ints, ReadRows]]:
            opened = [(self.open_shard(shard), count) for shard, count in runs]
            return read_shards(opened, indices, self.parts)

        try:
            return read()
        except ObjectChangedError:
            # Replaced since it was opened: if by an identical copy, reading continues.
            for shard, _ in runs:
                self._pool.close(self._shard_path(shard))
            return read()

    def _rows(
        self,
        order: Ints,
        shards: Ints,
        groups: Iterable[tuple[Ints, ReadRows]],
        restore_keys: Sequence[tuple[int, ...]],
        subflavors: Mapping[str, Any] | None,
    ) -> list[CrudeSample]:
        """Return the rows of `_read_shards` as dicts."""
        samples: list[Any] = [None] * len(order)
        for requested, rows in groups:
            own = order[requested]
            names, keys = in_order(self.shards, shards[requested]), in_order(restore_keys, own)
            made = rows.rows((names, keys, [subflavors] * len(own)))
            for index, sample in zip(own.tolist(), made, strict=True):
                samples[index] = sample
        return samples

    def _split_index(self, shard: int, index: int) -> int | None:
        """Return the index in the split of a sample of a shard; None if the split has others."""
        low, high = self.bounds[shard : shard + 2].tolist()
        split_index = low + index - int(self.firsts[shard])
        return split_index if low <= split_index < high else None

    def _index(self, ordinal: int) -> tuple[int, int]:
        """Return the shard that a sample is in, and its number there."""
        (shard,), (index,) = self._indices(split_indices_of(self, np.array([ordinal])))
        return int(shard), int(index)

    def _indices(self, split_indices: Ints) -> tuple[Ints, Ints]:
        """Return the shards of samples by their indices in the split, and their numbers there."""
        shards = np.searchsorted(self.bounds, split_indices, side="right") - 1
        return shards, split_indices - self.bounds[shards] + self.firsts[shards]

    def _shard_path(self, shard: int) -> str:
        # Joining takes longer than reading a sample, and is asked for with every few samples.
        path = self._paths.get(shard)
        if path is None:
            path = self._paths[shard] = os.fspath(self.path / self.shards[shard])
        return path

    def _find_excluded(self, excluded: Iterable[tuple[str, str]]) -> Ints:
        """Return the indices of excluded (shard, key) pairs in the split, ascending."""
        number = {shard: index for index, shard in enumerate(self.shards)}
        split_indices, missing = set(), []
        for shard, key in excluded:
            if shard not in number:
                continue
            index = self.open_shard(number[shard]).table.index_of(key)
            if index is None:
                missing.append(f"{shard}/{key} is excluded, but does not exist")
                continue
            split_index = self._split_index(number[shard], index)
            if split_index is not None:
                split_indices.add(split_index)
        warn_unmatched(self.path, missing)
        return np.array(sorted(split_indices), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Layout:
    """Shards of a split, one after another.

    Args:
        shards: Their paths below the dataset.
        counts: How many samples each has.
        firsts: The number of the first sample of each that belongs to the split, mostly 0.
        bounds: The index in the split of the first sample of each, and the end.
    """

    shards: list[str]
    counts: list[int]
    firsts: Ints
    bounds: Ints

    @classmethod
    def of(
        cls, split: Split, split_part: str, shards: Sequence[str], counts: Mapping[str, int]
    ) -> _Layout:
        """Lay out shards that are in the index, with as many samples as `counts` says."""
        sizes = [counts[shard] for shard in shards]
        ranges = [
            split.sample_range(split_part, shard, size)
            for shard, size in zip(shards, sizes, strict=True)
        ]
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        bounds = np.concatenate(([0], np.cumsum(edges[:, 1] - edges[:, 0])))
        return cls(list(shards), sizes, edges[:, 0], bounds)

    def only(self, chosen: NDArray[np.bool_]) -> _Layout:
        """Lay out some of the shards."""
        if chosen.all():
            return self
        return _Layout(
            list(compress(self.shards, chosen)),
            list(compress(self.counts, chosen)),
            self.firsts[chosen],
            np.concatenate(([0], np.cumsum(np.diff(self.bounds)[chosen]))),
        )

    def before(self, split_indices: Ints, chosen: NDArray[np.bool_]) -> Ints:
        """Return how many samples of some of the shards are before each of these indices."""
        shards = np.searchsorted(self.bounds, split_indices, side="right") - 1
        ends = np.concatenate(([0], np.cumsum(np.diff(self.bounds) * chosen)))
        inside = (split_indices - self.bounds[shards]) * np.append(chosen, False)[shards]
        return np.asarray(ends[shards] + inside)


MAX_UNMATCHED = 3
"""Entries that a warning about excluded samples names."""


def warn_unmatched(path: AnyPath, lines: Sequence[str]) -> None:
    """Warn once of entries of exclude lists that match nothing.

    Args:
        path: The dataset.
        lines: One for each entry.
    """
    if lines:
        more = len(lines) - MAX_UNMATCHED
        text = "; ".join([*lines[:MAX_UNMATCHED], *([f"and {more} more"] if more > 0 else [])])
        warn_once(logger, f"{path}: {text}", "%s: %s", path, text)


def split_indices_of(source: SplitSource, ordinals: Ints) -> Ints:
    """Return the indices of samples in the split, counting excluded ones.

    Raises:
        IndexError: If there is no such sample.
    """
    count = source.stop - source.start
    outside = ordinals[(ordinals < 0) | (ordinals >= count)]
    if len(outside):
        raise IndexError(
            f"{source.path}: split {source.split_part!r} has samples 0 to {count - 1}, not "
            f"{outside[0]}"
        )
    split_indices = ordinals + source.start
    return (
        include_ordinals(split_indices, source.excluded) if len(source.excluded) else split_indices
    )


def included(source: SplitSource, split_index: int) -> list[int]:
    """Return the number of the sample with an index in the split, as a list of one or of none."""
    if split_index in source.excluded:
        return []
    ordinal = int(exclude_indices(np.array([split_index]), source.excluded)[0]) - source.start
    return [ordinal] if 0 <= ordinal < source.stop - source.start else []
