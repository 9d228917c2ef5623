"""Read the rows of a plan from the sources of all its leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import EnergonError
from energon.io.settings import StorageSettings
from energon.plan.randomness import shared
from energon.plan.rows import Rows
from energon.samples.provenance import SourceInfo, record_sources
from energon.sources.read_ahead import DecodeAhead, PlannedReadAhead
from energon.sources.source import (
    DecodesAhead,
    ReadsLazily,
    Source,
)
from energon.stages.reading.blocks import LazyKeys, LazyRows, ReadAhead, RowsAtOnce

MIN_DECODED_BYTES = 1 << 10
"""Minimum average size of samples to decode them ahead; smaller ones are decoded in no time."""


@dataclass(frozen=True)
class LocatedSource(SourceInfo):
    """Where a sample came from, with everything needed to look at it."""

    key: str = ""
    offset: int = 0

    def __str__(self) -> str:
        return (
            f"sample {self.key!r} of {self.dataset_path} (number {self.index}; {self.shard_name} "
            f"at byte {self.offset})"
        )

    @property
    def quarantine_entry(self) -> str:
        """The line of a quarantine file that excludes it."""
        from energon.stages.hooks.quarantine import quarantine_line

        return quarantine_line(self.dataset_path, self.shard_name, self.key)


@dataclass(frozen=True)
class LostSource(SourceInfo):
    """Where a sample came from, as far as that is known without its shard."""

    reason: str = ""

    def __str__(self) -> str:
        return f"sample number {self.index} of {self.dataset_path}, not located: {self.reason}"


@dataclass(frozen=True)
class LeafReader:
    """Reads the samples of rows, as dicts of bytes.

    Args:
        sources: One for each leaf of the plan.
        subflavors: The `__subflavors__` of each leaf's samples.
        window_rows: Within how many rows of a stream all samples of a slice occur, for read-ahead
            from remote stores.
        source_paths: For each leaf, the dataset that `__sources__` names; None to record none.
            Empty to record none for any leaf.
    """

    sources: tuple[Source, ...]
    subflavors: tuple[Mapping[str, Any], ...]
    window_rows: int = 0
    source_paths: tuple[str | None, ...] = ()

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a sample over the leaves, in bytes."""
        return sum(source.mean_sample_bytes for source in self.sources) / len(self.sources)

    def read_ahead(self, lanes_of_stream: int) -> ReadAhead | None:
        """Return what fetches samples of stores ahead, or else decodes those of local files.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
        """
        if any(source.is_remote for source in self.sources):
            return PlannedReadAhead(
                self.sources,
                window_rows=self.window_rows,
                lanes_of_stream=lanes_of_stream,
                settings=StorageSettings.from_environment(),
            )
        decoded = {
            leaf: source
            for leaf, source in enumerate(self.sources)
            if isinstance(source, DecodesAhead) and source.mean_sample_bytes >= MIN_DECODED_BYTES
        }
        if not decoded:
            return None
        return DecodeAhead(decoded)

    def read(self, rows: Rows) -> list[Any]:
        """Return the samples of `rows`, in that order.

        Their `__restore_key__` is (leaf, epoch, ordinal).
        """
        leaves = _leaves_of(rows)
        if len(leaves) == 1:
            return self._read_leaf(leaves[0], rows)
        samples: list[Any] = [None] * len(rows.leaf)
        for leaf in leaves:
            places = np.flatnonzero(rows.leaf == leaf)
            found = self._read_leaf(leaf, rows.pick(places))
            for place, sample in zip(places.tolist(), found, strict=True):
                samples[place] = sample
        return samples

    def read_lazily(self, rows: Rows) -> LazyRows:
        """Do the same, but make samples only when their turn comes, if possible."""
        leaves = _leaves_of(rows)
        if len(leaves) == 1:
            return self._read_leaf_lazily(leaves[0], rows)
        lazy = {leaf: self._read_leaf_lazily(leaf, rows.pick(rows.leaf == leaf)) for leaf in leaves}
        return _LazyMix(rows.leaf, lazy)

    def locate(self, restore_key: tuple[int, ...]) -> tuple[SourceInfo, ...]:
        """Return the origin of the sample with this `__restore_key__`; for a join, all of them.

        If a shard cannot be read, the origin says so: messages about failures contain these.

        Raises:
            IndexError: If there is no such sample.
        """
        leaf, _, ordinal = restore_key[:3]
        if not 0 <= leaf < len(self.sources):
            raise IndexError(f"there are leaves 0 to {len(self.sources) - 1}, not {leaf}")
        return tuple(_locate(*origin) for origin in self.sources[leaf].origins(ordinal))

    def _read_leaf(self, leaf: int, rows: Rows) -> list[Any]:
        samples = self.sources[leaf].read(
            rows.ordinal, restore_keys=_keys(leaf, rows), subflavors=self.subflavors[leaf]
        )
        dataset_path = self._source_path(leaf)
        if dataset_path is not None:
            record_sources(dataset_path, samples)
        return samples

    def _read_leaf_lazily(self, leaf: int, rows: Rows) -> LazyRows:
        source = self.sources[leaf]
        if not isinstance(source, ReadsLazily):
            return RowsAtOnce(self._read_leaf(leaf, rows))
        keys = LazyKeys(leaf, rows.epoch, rows.ordinal)
        lazy = source.read_lazily(rows.ordinal, restore_keys=keys, subflavors=self.subflavors[leaf])
        dataset_path = self._source_path(leaf)
        return lazy if dataset_path is None else lazy.with_sources(dataset_path)

    def _source_path(self, leaf: int) -> str | None:
        return self.source_paths[leaf] if self.source_paths else None


def _leaves_of(rows: Rows) -> list[int]:
    """Return the leaves that rows are from, ascending; mostly it is a single one."""
    return sorted(set(shared(rows.leaf).tolist()))


def _keys(leaf: int, rows: Rows) -> list[tuple[int, ...]]:
    return list(LazyKeys(leaf, rows.epoch, rows.ordinal))


@dataclass(frozen=True)
class _LazyMix:
    """The samples of several leaves.

    Args:
        leaf: The leaf of each sample.
        lazy: The samples of each leaf.
    """

    leaf: NDArray[np.int32]
    lazy: Mapping[int, LazyRows]

    def between(self, start: int, stop: int) -> Iterator[Any]:
        """Return the samples from `start` to `stop`."""
        leaf = self.leaf[start:stop]
        before = np.bincount(self.leaf[:start], minlength=max(self.lazy) + 1).tolist()
        counts = np.bincount(leaf).tolist()
        own = {
            number: self.lazy[number].between(before[number], before[number] + count)
            for number, count in enumerate(counts)
            if count
        }
        kinds = {getattr(lazy, "column_names", None) for lazy in self.lazy.values()}
        if len(kinds) == 1 and None not in kinds:
            return _MixedSamples(leaf, own)
        following = {number: iter(samples) for number, samples in own.items()}
        return map(next, map(following.__getitem__, leaf.tolist()))


class _MixedSamples(Iterator[Any]):
    """The next samples of several leaves, which can be taken one by one or many at once.

    Args:
        leaf: The leaf of each sample.
        samples: The samples of each leaf, with columns of the same names.
    """

    def __init__(self, leaf: NDArray[np.int32], samples: Mapping[int, Any]) -> None:
        self._leaf, self._samples, self._at = leaf, samples, 0

    def __next__(self) -> Any:
        if self._at == len(self._leaf):
            raise StopIteration
        self._at += 1
        return next(self._samples[int(self._leaf[self._at - 1])])

    def __length_hint__(self) -> int:
        return len(self._leaf) - self._at

    def columns(self, count: int) -> dict[str, Any] | None:
        """Return the next `count` samples as one of columns; None if there are fewer."""
        leaf = self._leaf[self._at : self._at + count]
        if len(leaf) < count:
            return None
        self._at += count
        numbers = leaf.tolist()
        places = {
            number: [place for place, each in enumerate(numbers) if each == number]
            for number in dict.fromkeys(numbers)
        }
        found = {number: self._samples[number].columns(len(at)) for number, at in places.items()}
        if len(found) == 1:
            return found[numbers[0]]  # type: ignore[no-any-return]
        first = found[numbers[0]]
        pairs = [(at, found[number]) for number, at in places.items()]
        return {name: _merged([(at, own[name]) for at, own in pairs], count) for name in first}


def _merged(columns: Sequence[tuple[Sequence[int], Any]], count: int) -> Any:
    """Return columns of some samples as one; arrays are padded with zeros, as in collating.

    Args:
        columns: Each with the places of its samples.
        count: How many samples there are.
    """
    arrays = [values for _, values in columns if isinstance(values, np.ndarray)]
    if not arrays:
        if columns[0][1] is None:
            return None
        merged: Any = [None] * count
        for places, values in columns:
            for place, value in zip(places, values, strict=True):
                merged[place] = value
        return merged
    shape = (count, *map(max, *(array.shape[1:] for array in arrays)))
    is_even = all(array.shape[1:] == shape[1:] for array in arrays)
    merged = (np.empty if is_even else np.zeros)(shape, np.result_type(*arrays))
    for places, values in columns:
        merged[(places, *map(slice, values.shape[1:]))] = values
    return merged


def _locate(source: Source, ordinal: int) -> SourceInfo:
    try:
        found = source.locate(ordinal)
    except (EnergonError, OSError) as error:
        return LostSource(str(source.path), ordinal, None, (), reason=str(error))
    return LocatedSource(
        dataset_path=str(source.path),
        index=ordinal,
        shard_name=found.shard,
        file_names=tuple(f"{found.key}.{part}" for part in found.parts),
        key=found.key,
        offset=found.offset,
    )
