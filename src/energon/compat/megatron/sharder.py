"""Divide the samples of shards among workers, for programs that do so themselves.

Pipelines of energon do not use it: the plan assigns samples to their lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from energon.compat.megatron.datasets.arguments import DatasetSubset
from energon.worker import WorkerConfig

MAX_OVERSIZE = 1.5
"""A slice that exceeds its intended length by this factor is split."""


class Sharder:
    """Divides samples among the workers of all ranks, evenly and in runs as long as possible."""

    @classmethod
    def split_samples_to_workers(
        cls,
        start_samples: int,
        end_samples: int,
        worker_config: WorkerConfig,
        *,
        rotation_offset: int = 0,
    ) -> list[int]:
        """Return the start of each worker's samples for this rank, and the end of the last.

        Args:
            start_samples: Number of the first sample.
            end_samples: Number of the one after the last.
            worker_config: This rank, and the number of ranks and workers.
            rotation_offset: The first worker to get one sample more than others.
        """
        workers = max(1, worker_config.num_workers)
        total = workers * worker_config.world_size
        each, more = divmod(end_samples - start_samples, total)
        counts = [0] * total
        for turn, worker in enumerate(_spread(list(range(total)))):
            counts[worker] = each + ((turn - rotation_offset) % total < more)
        edges = list(accumulate(counts, initial=start_samples))
        first = worker_config.rank * workers
        return edges[first : first + workers + 1]

    @classmethod
    def shard_workers(
        cls,
        shards: Sequence[Any],
        worker_config: WorkerConfig,
        *,
        max_samples_per_sequence: int | None,
        subset: DatasetSubset | None = None,
        rotation_offset: int = 0,
    ) -> tuple[tuple[int, ...], ...]:
        """Return the starts of each worker's slices for this rank, and the end of its last one.

        Args:
            shards: Objects with a `count`; slices do not cross shards.
            worker_config: See `split_samples_to_workers`.
            max_samples_per_sequence: Maximum length of a slice; None for no limit.
            subset: The part of the samples to use.
            rotation_offset: See `split_samples_to_workers`.
        """
        edges = list(accumulate((shard.count for shard in shards), initial=0))
        start, stop = (0, edges[-1]) if subset is None else subset.compute_subset(edges[-1])
        ranges = cls.split_samples_to_workers(
            start, stop, worker_config, rotation_offset=rotation_offset
        )
        return tuple(
            _slices(
                [low, *(edge for edge in edges if low < edge < high), high],
                max_samples_per_sequence,
            )
            for low, high in pairwise(ranges)
        )

    @classmethod
    def slice_workers(
        cls,
        total_samples: int,
        worker_config: WorkerConfig,
        *,
        max_samples_per_sequence: int | None,
        subset: DatasetSubset | None = None,
        rotation_offset: int = 0,
    ) -> tuple[tuple[int, ...], ...]:
        """Return the result of `shard_workers` for samples in a single file."""
        start, stop = (0, total_samples)
        if subset is not None:
            start, stop = subset.compute_subset(total_samples)
        ranges = cls.split_samples_to_workers(
            start, stop, worker_config, rotation_offset=rotation_offset
        )
        return tuple(_slices(each, max_samples_per_sequence) for each in pairwise(ranges))


def _slices(edges: Sequence[int], longest: int | None) -> tuple[int, ...]:
    """Return the starts of the slices between some edges, and the end of the last."""
    starts = (start for low, high in pairwise(edges) for start in _cut(low, high, longest))
    return (*dict.fromkeys(starts), edges[-1])


def _cut(low: int, high: int, longest: int | None) -> Iterator[int]:
    size = high - low
    if size <= 0:
        return
    count = 1
    if longest is not None and size > longest * MAX_OVERSIZE:
        count = max(round(size / longest), 1)
    yield from (low + int(number * (size / count)) for number in range(count))


def _spread(numbers: list[int]) -> list[int]:
    """Return numbers in an order in which every prefix is spread evenly over all of them."""
    if len(numbers) <= 2:
        return numbers
    middle = len(numbers) // 2
    halves = zip_longest(_spread(numbers[:middle]), _spread(numbers[middle:]))
    return [number for pair in halves for number in pair if number is not None]
