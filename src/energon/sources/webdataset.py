"""Read samples of a prepared WebDataset by ordinal, many at a time.

The part table of a shard says where the content of every part is, so no tar headers are parsed.
Samples that are close together are read with one call, large parts with one each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, pairwise, repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from energon.errors import (
    DatasetNotFoundError,
    EmptyDatasetError,
    EnergonError,
    ObjectChangedError,
)
from energon.formats.meta.info import load_info
from energon.formats.meta.split import load_split
from energon.io.address import is_remote
from energon.io.epath import AnyPath, any_path
from energon.io.files import file_sizes
from energon.messages import counted, shell_word, warn_once
from energon.plan.leaves.subset import exclude_indices, include_ordinals, resolve_range
from energon.samples.crude import CrudeSample
from energon.samples.field_map import FieldMap
from energon.sources.kinds import Extents, Location, Source, content_fingerprint, selected_extents
from energon.sources.reader import LazyKeys
from energon.sources.shard_samples import (
    PartFilter,
    PartNames,
    ReadRows,
    SlicedRows,
    lazy_rows,
    read_shard,
)
from energon.sources.shards import OPEN_THREADS, OpenShard, ShardPool
from energon.stages.reading.blocks import LazyLeafRows, RowsAtOnce

logger = logging.getLogger("energon")

MAX_LAZY_BYTES = 2 << 20
"""Up to this many bytes that were read together, parts are cut when they are needed. Beyond that,
they are cut at once, while the data is in the processor cache."""
MEAN_SIZE_SHARDS = 8
MAX_PROBED_SHARDS = 10_000
"""How many shards are opened at most to determine which parts samples have."""
MAX_SCANNED_SHARDS = 4
"""How many of them may lack a part table, so that all of their headers are read."""


class WebdatasetSource:
    """The samples of a split, or of a subset of it, numbered from 0 through all its shards.

    Excluded samples have no number. Opening reads the `.nv-meta` files; shards and their
    tables are opened when they are first read. Pickled copies open them again.

    Args:
        path: Folder of the prepared dataset.
        split_part: The split to read.
        split_config: File below `.nv-meta` that lists the splits.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: What to exclude in addition to the split's list, in the same form.
        parts: Which parts of the samples to read; None reads all.
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
        *,
        split_part: str = "train",
        split_config: str = "split.yaml",
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
        parts: Iterable[str] | PartFilter | None = None,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self.path = any_path(path)
        self.is_remote = is_remote(self.path)
        self._paths: dict[int, str] = {}
        self.split_part = split_part
        self.parts = parts if parts is None or isinstance(parts, PartFilter) else PartNames(parts)
        counts = load_info(self.path, allow).shard_counts
        split = load_split(self.path, split_config, allow)
        split = replace(split, exclude=[*split.exclude, *exclude])
        for line in split.unmatched(counts):
            warn_once(logger, f"{self.path}: {line}", "%s: %s", self.path, line)
        self.shards = split.shards(split_part)
        if not self.shards and (listed := replace(split, exclude=()).shards(split_part)):
            raise EmptyDatasetError(
                f"{self.path}: split {split_part!r} has no samples: "
                f"{counted(len(listed), 'shard')}, all excluded; correct `exclude` in "
                f".nv-meta/{split_config}, or what exclude_from lists"
            )
        unknown = [shard for shard in self.shards if shard not in counts]
        if unknown:
            raise DatasetNotFoundError(
                f"{self.path}: split {split_part!r} lists {unknown[0]!r}, which is not in "
                f"the index ({len(unknown)} such shards); run `energon prepare "
                f"{shell_word(self.path)}`"
            )
        self._counts = [counts[shard] for shard in self.shards]
        ranges = [
            split.sample_range(split_part, shard, count)
            for shard, count in zip(self.shards, self._counts, strict=True)
        ]
        edges = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        # Number of the first sample of each shard that belongs to the split, mostly 0.
        self.firsts = edges[:, 0]
        self.bounds = np.concatenate(([0], np.cumsum(edges[:, 1] - edges[:, 0])))
        self._pool = ShardPool() if pool is None else pool
        self.excluded = self._find_excluded(split.excluded_samples)
        num_included = int(self.bounds[-1]) - len(self.excluded)
        self.start, self.stop = resolve_range(num_included, subsets)
        if self.start >= self.stop:
            raise EmptyDatasetError(
                f"{self.path}: split {split_part!r} has no samples: {len(self.shards)} shards with "
                f"{self.bounds[-1]} samples, {len(self.excluded)} of them excluded, subset "
                f"[{self.start}, {self.stop}); list shards in .nv-meta/{split_config}, or remove "
                "the dataset"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    @cached_property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample in its tar file, in bytes, estimated from a few shards."""
        spread = np.linspace(0, len(self.shards) - 1, MEAN_SIZE_SHARDS).astype(int)
        chosen = sorted(set(spread.tolist()))
        try:
            sizes = file_sizes([self._shard_path(shard) for shard in chosen])
        except DatasetNotFoundError as error:
            raise DatasetNotFoundError(
                f"{error}, but the dataset lists it; restore it, or run `energon prepare "
                f"{shell_word(self.path)}` again without it"
            ) from error
        return sum(sizes) / max(1, sum(self._counts[int(shard)] for shard in chosen))

    @property
    def paths(self) -> list[AnyPath]:
        """Its folder, in a list of one."""
        return [self.path]

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the samples and their order, which a saved state must match."""
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
        ordinals: NDArray[np.int64],
        *,
        restore_keys: Sequence[tuple[int, ...]] | None = None,
        subflavors: Mapping[str, Any] | None = None,
    ) -> list[CrudeSample]:
        """Return samples as dicts of bytes, in the order of `ordinals`.

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
        order, pieces = self._read_shards(ordinals, restore_keys, subflavors)
        return _in_order(order, pieces)

    def read_lazily(
        self,
        ordinals: NDArray[np.int64],
        *,
        restore_keys: LazyKeys,
        subflavors: Mapping[str, Any] | None = None,
    ) -> LazyLeafRows:
        """Do the same, but make dicts only when their turn comes, if possible."""
        order, pieces = self._read_shards(ordinals, restore_keys, subflavors)
        alike = [piece for piece in pieces if not isinstance(piece, list)]
        if len(alike) < len(pieces) or len({piece.parts for piece in alike}) != 1:
            return RowsAtOnce(_in_order(order, pieces))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        places = back.tolist()

        def in_order(columns: Iterable[Iterable[Any]]) -> list[Any]:
            return list(map(list(chain.from_iterable(columns)).__getitem__, places))

        parts = alike[0].parts
        meta = [
            in_order(piece.meta[0] for piece in alike),
            in_order(islice(piece.meta[1], len(piece)) for piece in alike),
            restore_keys,
            [subflavors] * len(places),
        ]
        sliced = [piece for piece in alike if isinstance(piece, SlicedRows)]
        is_large = sum(piece.num_bytes for piece in sliced) > MAX_LAZY_BYTES
        if is_large or len(sliced) < len(alike):
            return lazy_rows(parts, meta, in_order(piece.contents() for piece in alike))
        buffers = in_order(piece.buffers for piece in sliced)
        edges = np.concatenate([piece.edges for piece in sliced], axis=1)[:, back]
        return SlicedRows(parts, meta, buffers, edges).lazy()

    def extents(self, ordinals: NDArray[np.int64]) -> Iterator[Extents]:
        """Yield where samples are, shard by shard.

        Shards that are not open yet are opened together, so that waiting for a remote store does
        not add up. Shards that cannot be opened are skipped.
        """
        raw = places_of(self, ordinals)
        shards = np.searchsorted(self.bounds, raw, side="right") - 1
        numbers = sorted(set(shards.tolist()))
        opened_shards = self._pool.open_together(self.open_shard, numbers)
        for shard, opened in zip(numbers, opened_shards, strict=True):
            if opened is None:
                continue
            places = np.flatnonzero(shards == shard)
            indices = raw[places] - self.bounds[shard] + self.firsts[shard]
            low, high = selected_extents(opened.table, indices, self.parts)
            yield Extents(opened.file, places, low, high)

    def locate(self, ordinal: int) -> Location:
        """Return where a sample is."""
        raw = int(places_of(self, np.array([ordinal]))[0])
        shard = int(np.searchsorted(self.bounds, raw, side="right")) - 1
        index = raw - int(self.bounds[shard]) + int(self.firsts[shard])
        table = self.open_shard(shard).table
        return Location(
            key=table.keys(np.array([index]))[0],
            shard=self.shards[shard],
            sample=index,
            offset=table.sample_extent(index)[0],
            parts=tuple(name for name, _, _ in table.sample_parts(index)),
        )

    def origins(self, ordinal: int) -> list[tuple[Source, int]]:
        return [(self, ordinal)]

    def keys(self, ordinals: NDArray[np.int64]) -> list[str]:
        return [self.locate(ordinal).key for ordinal in ordinals.tolist()]

    def find(self, key: str) -> list[int]:
        found = []
        for shard in range(len(self.shards)):
            sample = self.open_shard(shard).table.index_of(key)
            if sample is not None:
                low, high = self.bounds[shard : shard + 2].tolist()
                place = low + sample - int(self.firsts[shard])
                if low <= place < high:
                    found += included(self, place)
        return found

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        edges = np.array([self.start, self.stop - 1])
        low, high = include_ordinals(edges, self.excluded).tolist()
        bounds = zip(
            self.shards,
            self.bounds[:-1].tolist(),
            self.bounds[1:].tolist(),
            self.firsts.tolist(),
            strict=True,
        )
        return ("shards", str(self.path)), {
            shard: (max(start, low) - start + first, min(stop, high + 1) - start + first)
            for shard, start, stop, first in bounds
            if start <= high and low < stop
        }

    def shard_of(self, ordinal: int) -> str:
        """Return the shard of a sample, without opening it."""
        raw = places_of(self, np.array([ordinal]))[0]
        return self.shards[int(np.searchsorted(self.bounds, raw, side="right")) - 1]

    def check_field_map(self, field_map: FieldMap) -> None:
        """Check with the index that some sample has a part for each field.

        As many shards are opened as it takes to find all parts, usually one. Nothing is checked if
        shards cannot be opened, or if too many would have to be.

        Raises:
            ConfigError: If no sample has such a part.
        """
        found: set[str] = set()
        for names in self._part_names():
            if names is None:
                return
            found |= names
            if not field_map.unmapped(found):
                return
        field_map.check_parts(found, origin=str(self.path))

    def _part_names(self) -> Iterator[frozenset[str] | None]:
        """Yield the names of the parts in each shard; None where they cannot be determined."""
        count = len(self.shards)
        spread = np.linspace(0, count - 1, min(count, MAX_PROBED_SHARDS)).astype(int)
        scanned = 0
        for opened in self._opened(sorted(set(spread.tolist()))):
            scanned += opened is not None and not opened.table.shard_mtime_ns
            if opened is None or scanned > MAX_SCANNED_SHARDS:
                yield None
            else:
                yield frozenset(opened.table.part_names)
        if count > MAX_PROBED_SHARDS:
            yield None

    def open_shards(self, shards: Sequence[int]) -> list[OpenShard | None]:
        """Return shards, opened several at a time; None for those that cannot be opened."""
        return self._pool.open_together(self.open_shard, shards)

    def _opened(self, shards: Sequence[int]) -> Iterator[OpenShard | None]:
        """Yield open shards; remote ones are opened several at a time, except for the first."""
        if self.is_remote:
            for start in (0, *range(1, len(shards), OPEN_THREADS)):
                together = shards[start : start + (OPEN_THREADS if start else 1)]
                yield from self._pool.open_together(self.open_shard, together)
            return
        for shard in shards:
            try:
                yield self.open_shard(shard)
            except EnergonError:
                yield None

    def _read_shards(
        self,
        ordinals: NDArray[np.int64],
        restore_keys: Sequence[tuple[int, ...]] | None,
        subflavors: Mapping[str, Any] | None,
    ) -> tuple[NDArray[np.int64], list[ReadRows]]:
        """Return samples shard by shard, and their places in `ordinals`."""
        raw = places_of(self, ordinals)
        order = np.argsort(raw, kind="stable")
        raw = raw[order]
        shards = np.searchsorted(self.bounds, raw, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(raw)]
        keys: Sequence[tuple[int, ...]]
        if isinstance(restore_keys, LazyKeys):
            keys = restore_keys[order]
        else:
            given = list(zip(ordinals.tolist())) if restore_keys is None else restore_keys
            keys = [given[place] for place in order.tolist()]
        pieces = []
        for start, stop in pairwise(cuts):
            if start < stop:
                shard = int(shards[start])
                local = raw[start:stop] - self.bounds[shard] + self.firsts[shard]
                pieces.append(self._read_shard(shard, local, keys[start:stop], subflavors))
        return order, pieces

    def _read_shard(
        self,
        shard: int,
        indices: NDArray[np.int64],
        restore_keys: Sequence[tuple[int, ...]],
        subflavors: Mapping[str, Any] | None,
    ) -> ReadRows:
        """Return samples of one shard, given ascending `indices`."""

        def read() -> ReadRows:
            notes = (repeat(self.shards[shard]), restore_keys, repeat(subflavors))
            return read_shard(self.open_shard(shard), indices, notes, parts=self.parts)

        try:
            return read()
        except ObjectChangedError:
            # Replaced since it was opened: if by an identical copy, reading continues.
            self._pool.close(self._shard_path(shard))
            return read()

    def _shard_path(self, shard: int) -> str:
        # Joining takes longer than reading a sample, and is asked for with every few samples.
        path = self._paths.get(shard)
        if path is None:
            path = self._paths[shard] = os.fspath(self.path / self.shards[shard])
        return path

    def open_shard(self, shard: int) -> OpenShard:
        """Return one of `shards`, open."""
        path = self._shard_path(shard)
        return self._pool.open(path, num_samples=self._counts[shard], dataset=self.path)

    def _find_excluded(self, excluded: Iterable[tuple[str, str]]) -> NDArray[np.int64]:
        """Return the places of excluded (shard, key) pairs in the split, ascending."""
        number = {shard: index for index, shard in enumerate(self.shards)}
        places = set()
        for shard, key in excluded:
            if shard not in number:
                continue
            index = self.open_shard(number[shard]).table.index_of(key)
            if index is None:
                logger.warning("%s: %s/%s is excluded, but does not exist", self.path, shard, key)
                continue
            start, stop = self.bounds[number[shard] : number[shard] + 2].tolist()
            place = start + index - int(self.firsts[number[shard]])
            if start <= place < stop:
                places.add(place)
        return np.array(sorted(places), dtype=np.int64)


def _in_order(order: NDArray[np.int64], pieces: list[ReadRows]) -> list[CrudeSample]:
    """Return the samples of pieces at their places."""
    samples: list[Any] = [None] * len(order)
    found = (piece if isinstance(piece, list) else piece.rows() for piece in pieces)
    for place, sample in zip(order.tolist(), chain.from_iterable(found), strict=True):
        samples[place] = sample
    return samples


class _Numbered(Protocol):
    """A source that excludes samples of its split, and is narrowed to a range of the others."""

    path: AnyPath
    split_part: str
    start: int
    excluded: NDArray[np.int64]

    def __len__(self) -> int: ...


def places_of(source: _Numbered, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places in the split of samples, counting excluded ones.

    Raises:
        IndexError: If there is no such sample.
    """
    outside = ordinals[(ordinals < 0) | (ordinals >= len(source))]
    if len(outside):
        raise IndexError(
            f"{source.path}: split {source.split_part!r} has samples 0 to {len(source) - 1}, not "
            f"{outside[0]}"
        )
    places = ordinals + source.start
    return include_ordinals(places, source.excluded) if len(source.excluded) else places


def included(source: _Numbered, place: int) -> list[int]:
    """Return the number of the sample at a place in the split, as a list of one or of none."""
    if place in source.excluded:
        return []
    ordinal = int(exclude_indices(np.array([place]), source.excluded)[0]) - source.start
    return [ordinal] if 0 <= ordinal < len(source) else []
