"""Read the rows of a plan from the sources of all its leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import numpy as np

from energon.errors import EnergonError
from energon.io.settings import StorageSettings
from energon.plan.randomness import shared
from energon.plan.rows import Rows
from energon.samples.provenance import SourceInfo
from energon.sources.read_ahead import DecodeAhead, PlannedReadAhead
from energon.sources.source import DecodesAhead, Source
from energon.stages.blocks import Block, ReadAhead

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

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> ReadAhead | None:
        """Return the read-ahead of remote samples, or the decoding ahead of local ones.

        Args:
            lanes_of_stream: How many lanes read the same slices, over all workers.
            mixed_rows: Rows of a lane that are balanced together, with those of other lanes.
        """
        if any(source.is_remote for source in self.sources):
            return PlannedReadAhead(
                self.sources,
                window_rows=-(-self.window_rows // lanes_of_stream) + mixed_rows,
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

    def read(self, rows: Rows) -> Block:
        """Return the samples of `rows`, in that order.

        Their `__restore_key__` is (leaf, epoch, ordinal).
        """
        leaves = sorted(set(shared(rows.leaf).tolist()))
        if len(leaves) == 1:  # nearly always
            return self._read_leaf(leaves[0], rows)
        blocks = {leaf: self._read_leaf(leaf, rows.pick(rows.leaf == leaf)) for leaf in leaves}
        return _MixedBlock(rows.leaf.tolist(), blocks)

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

    def _read_leaf(self, leaf: int, rows: Rows) -> Block:
        source = self.sources[leaf]
        keys = list(zip(repeat(leaf), rows.epoch.tolist(), rows.ordinal.tolist(), strict=False))
        block = source.read(rows.ordinal, restore_keys=keys, subflavors=self.subflavors[leaf])
        dataset_path = self.source_paths[leaf] if self.source_paths else None
        return block if dataset_path is None else block.with_sources(dataset_path)


class _MixedBlock(Block):
    """The samples of several leaves.

    Args:
        leaves: The leaf of each sample.
        blocks: The samples of each leaf.
    """

    def __init__(self, leaves: list[int], blocks: Mapping[int, Block]) -> None:
        self._leaves, self._blocks = leaves, blocks
        counters = defaultdict[int, Iterator[int]](count)
        # The number of each sample among those of its leaf.
        self._numbers = [next(counters[leaf]) for leaf in leaves]
        names = {block.column_names for block in blocks.values()}
        self.column_names = names.pop() if len(names) == 1 else ()

    def samples(self, start: int, stop: int) -> list[Any]:
        leaves = self._leaves[start:stop]
        own = {
            leaf: iter(self._blocks[leaf].samples(first, last))
            for leaf, (first, last) in self._bounds(start, stop).items()
        }
        return list(map(next, map(own.__getitem__, leaves)))

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        leaves, bounds = self._leaves[start:stop], self._bounds(start, stop)
        own = {leaf: self._blocks[leaf].columns(*bounds[leaf]) for leaf in bounds}
        if len(own) == 1:
            return own[leaves[0]]
        indices = {
            leaf: [index for index, each in enumerate(leaves) if each == leaf] for leaf in own
        }
        return {
            name: _merged([(indices[leaf], own[leaf][name]) for leaf in own], len(leaves))
            for name in own[leaves[0]]
        }

    def _bounds(self, start: int, stop: int) -> dict[int, tuple[int, int]]:
        """Return for each leaf which of its samples are among those from `start` to `stop`."""
        leaves = self._leaves[start:stop]
        firsts = {leaf: self._numbers[start + leaves.index(leaf)] for leaf in dict.fromkeys(leaves)}
        return {leaf: (first, first + leaves.count(leaf)) for leaf, first in firsts.items()}


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
