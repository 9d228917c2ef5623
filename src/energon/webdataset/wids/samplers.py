"""Orders in which to go through samples by number, that keep to one shard or chunk for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.errors import ConfigError
from energon.plan.permutation import permute
from energon.plan.seeds import derive_seed
from energon.webdataset.running.place import current_place


class ShardListSampler:
    """Goes through the shards in random order, and through the samples of each in random order.

    Args:
        dataset: A `ShardListDataset`, or anything with `lengths`.
        lengths: Lengths of the shards; None means those of the dataset.
        seed: What the order depends on, beside the epoch.
        shufflefirst: Whether the first epoch has its shards in random order, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
        shufflefirst: bool = False,
    ) -> None:
        self.lengths = list(dataset.lengths if lengths is None else lengths)
        self.seed = seed
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be number `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        starts = [0, *accumulate(self.lengths)]
        shards = np.arange(len(self.lengths))
        if epoch > 0 or self.shufflefirst:
            shards = _permuted(shards, derive_seed(self.seed, epoch))
        for shard in shards.tolist():
            numbers = np.arange(starts[shard], starts[shard + 1])
            yield from _permuted(numbers, derive_seed(self.seed, epoch, shard)).tolist()


ShardedSampler = ShardListSampler


class ChunkedSampler:
    """Goes through chunks of consecutive samples in random order, shuffled within each.

    Args:
        dataset: Anything with a length.
        num_samples: How many samples from the first, or first and end of a range; None for all.
        chunksize: Samples of a chunk.
        seed: What the order depends on, beside the epoch.
        shuffle: Whether there is any shuffling.
        shufflefirst: Whether the first epoch is shuffled, too.
        dslength_per_replica: Accepted for compatibility: the length is that of what is given.

    Raises:
        ConfigError: If the range is not one of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
        dslength_per_replica: int = -1,
    ) -> None:
        size = len(dataset)
        if num_samples is None:
            self.start, self.stop = 0, size
        elif isinstance(num_samples, int):
            self.start, self.stop = 0, num_samples
        else:
            self.start, self.stop = num_samples
        if not 0 <= self.start <= self.stop <= size:
            raise ConfigError(f"num_samples={num_samples}: the dataset has {size} samples")
        if chunksize < 1:
            raise ConfigError(f"chunksize={chunksize}: expected 1 or more")
        self.chunksize = chunksize
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be number `epoch`."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        shuffled = self.shuffle and (epoch > 0 or self.shufflefirst)
        starts = np.arange(self.start, self.stop, self.chunksize)
        if shuffled:
            starts = _permuted(starts, derive_seed(self.seed, epoch))
        for start in starts.tolist():
            numbers = np.arange(start, min(start + self.chunksize, self.stop))
            if shuffled:
                numbers = _permuted(numbers, derive_seed(self.seed, epoch, start))
            yield from numbers.tolist()


class DistributedChunkedSampler(ChunkedSampler):
    """Assigns each rank its part of the samples, all ranks the same number of them.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None asks torch.distributed and the environment.
        num_samples: See `ChunkedSampler`.
        rank: This rank; None asks them, too.
        shuffle: Whether there is any shuffling.
        shufflefirst: Whether the first epoch is shuffled, too.
        seed: What the order depends on, beside the epoch.
        drop_last: Whether samples that cannot be dealt evenly are left out; else some ranks get
            one that others have, too.
        chunksize: Samples of a chunk.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int | None = None,
        num_samples: int | tuple[int, int] | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        shufflefirst: bool = False,
        seed: int = 0,
        drop_last: bool | None = None,
        chunksize: int = 1_000_000,
    ) -> None:
        place = current_place()
        self.num_replicas = place.world_size if num_replicas is None else num_replicas
        self.rank = place.rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"rank {self.rank} of {self.num_replicas} ranks")
        super().__init__(
            dataset,
            num_samples=num_samples,
            chunksize=chunksize,
            seed=seed,
            shuffle=shuffle,
            shufflefirst=shufflefirst,
        )
        first, last, count = self.start, self.stop, self.num_replicas
        share = (last - first) // count if drop_last else -(-(last - first) // count)
        # The last parts overlap, so that all have the same length.
        self.start = max(first, min(first + self.rank * share, last - share))
        self.stop = min(self.start + share, last)


def _permuted(numbers: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    if len(numbers) < 2:
        return numbers
    places = permute(np.arange(len(numbers)), np.array([len(numbers)]), np.array([seed], np.uint64))
    return numbers[places]
