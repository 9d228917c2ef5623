"""Samples of shards by number: map-style datasets, their index files, and samplers for them."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any, Self

import numpy as np

from energon.errors import ConfigError, DuplicateSampleKeyError
from energon.formats.tar.parser import StreamSample
from energon.io.address import parent_address
from energon.io.epath import EPath
from energon.plan.randomness import derive_seed
from energon.sources.shards import OpenShard, ShardPool
from energon.webdataset import security
from energon.webdataset.autodecode import Decoder
from energon.webdataset.descriptor import Descriptor, ShardInfo, load_descriptor
from energon.webdataset.descriptor import create_descriptor as create_descriptor
from energon.webdataset.descriptor import save_descriptor as save_descriptor
from energon.webdataset.running.worker_info import current_worker_info
from energon.webdataset.shardlists import permuted


class Decoding:
    """Decodes samples whose fields are streams.

    Args:
        images: "pil" for images of Pillow, "numpy" for arrays of uint8.
        allowed: Whether pickles may be unpickled.
    """

    def __init__(self, images: str, allowed: frozenset[str] = frozenset()) -> None:
        self._decoder = Decoder("rgb8" if images == "numpy" else "pil", allow=allowed)

    def __call__(self, sample: StreamSample) -> StreamSample:
        fields = {name[1:]: value.getvalue() for name, value in sample.items() if _is_stream(value)}
        meta = {name: value for name, value in sample.items() if name.startswith("__")}
        decoded = self._decoder.decode({**meta, **fields})
        return {
            name: decoded[name[1:]] if _is_stream(value) else value
            for name, value in sample.items()
        }


def _is_stream(value: Any) -> bool:
    return isinstance(value, io.BytesIO)


Transform = Callable[[StreamSample], StreamSample]


class ShardListDataset:
    """The samples of some shards, numbered from 0 across all of them in order.

    A sample is read by its index entry with one request, from local disk or an object store;
    shards without an index (`energon tar index`) are scanned once when they are opened.
    Samples are dicts of fields with a leading dot (`.jpg`), `__key__`, `__dataset__`,
    `__index__`, `__shard__` and `__shardindex__`.

    Args:
        shards: A list of dicts of `url` and `nsamples`, or the address of an index file.
        lru_size: How many shards to keep open.
        dataset_name: Name of the dataset, if its index has none.
        transformations: "PIL" or "numpy" decode fields, with images in that form; a function or
            list of them transforms samples whose fields are streams; None leaves them unchanged.
        base: The base of relative addresses.
        allow: "pickle" permits pickled fields.
        cache_size: Accepted for compatibility, like `cache_dir`, `localname`, `keep` and
            `options`: nothing is copied.

    Raises:
        FormatError: If the index is invalid.
    """

    def __init__(
        self,
        shards: Any,
        *,
        cache_size: float = 1e12,
        cache_dir: str | None = None,
        lru_size: int = 10,
        dataset_name: str | None = None,
        localname: Callable[[str], str] | None = None,
        transformations: Any = "PIL",
        keep: bool = False,
        base: str | None = None,
        options: Any = None,
        allow: Collection[str] = (),
    ) -> None:
        self.spec: Descriptor = load_descriptor(shards, base=base)
        self.shards: tuple[ShardInfo, ...] = self.spec.shards
        is_address = isinstance(shards, str | os.PathLike)
        address = os.fspath(shards) if is_address else "dataset"
        self.dataset_name = dataset_name or self.spec.name or address
        self.lengths = [shard.nsamples for shard in self.shards]
        self.cum_lengths = [0, *accumulate(self.lengths)]
        self.total_length = self.cum_lengths[-1]
        self._transforms = _transforms(transformations, security.resolve(allow))
        self._pool = ShardPool(lru_size)
        self._opened: set[int] = set()
        self._accesses = self._misses = 0

    def __len__(self) -> int:
        return self.total_length

    def __getitem__(self, index: int) -> StreamSample:
        """Return one sample; negative numbers count from the end.

        Raises:
            IndexError: If there is no such sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[StreamSample]:
        """Return several samples; those of the same shard are read together."""
        numbers = [self._checked(int(index)) for index in indices]
        samples: dict[int, StreamSample] = {}
        by_shard: dict[int, list[int]] = {}
        for number in dict.fromkeys(numbers):
            by_shard.setdefault(bisect_right(self.cum_lengths, number) - 1, []).append(number)
        for shard, members in by_shard.items():
            samples |= self._read(shard, sorted(members))
        return [self._transformed(dict(samples[number])) for number in numbers]

    def add_transform(self, transform: Transform) -> Self:
        """Add a function of samples, after the others."""
        self._transforms.append(transform)
        return self

    def get_shard(self, index: int) -> ShardInfo:
        """Return the shard that a sample is in."""
        return self.shards[bisect_right(self.cum_lengths, self._checked(index)) - 1]

    def get_stats(self) -> tuple[int, int]:
        """Return how many samples were read, and how often a shard had to be opened for one."""
        return self._accesses, self._misses

    def check_cache_misses(self) -> bool:
        """Return whether shards are opened too often: more than for every third sample."""
        return self._accesses > 100 and self._misses > 0.3 * self._accesses

    def close(self) -> None:
        """Close all shards."""
        self._pool = ShardPool(self._pool.max_open)
        self._opened.clear()

    def _checked(self, index: int) -> int:
        number = index + self.total_length if index < 0 else index
        if not 0 <= number < self.total_length:
            raise IndexError(f"no sample {index}; expected 0 to {self.total_length - 1}")
        return number

    def _read(self, shard: int, numbers: list[int]) -> dict[int, StreamSample]:
        info = self.shards[shard]
        opened = self._open(shard)
        start = self.cum_lengths[shard]
        rows = [number - start for number in numbers]
        parts = [opened.table.sample_parts(row) for row in rows]
        extents = [extent for row in parts for extent in row]
        contents = iter(
            opened.file.pread_many([offset for _, offset, _ in extents], [s for *_, s in extents])
        )
        keys = opened.table.keys(np.array(rows))
        samples = {}
        for number, row, key, members in zip(numbers, rows, keys, parts, strict=True):
            fields = {f".{name}".lower(): next(contents) for name, _, _ in members}
            if len(fields) < len(members):
                raise DuplicateSampleKeyError(
                    f"{info.url}: sample {key!r} has a field twice, its files end in "
                    f"{', '.join(name for name, _, _ in members)}; if these are two samples, give "
                    "them different keys, as `energon prepare --fix-duplicates` does"
                )
            samples[number] = {
                **fields,
                "__key__": key,
                "__dataset__": info.dataset or self.dataset_name,
                "__index__": number,
                "__shard__": info.url,
                "__shardindex__": row,
            }
        self._accesses += len(numbers)
        return samples

    def _open(self, shard: int) -> OpenShard:
        if shard not in self._opened:
            self._misses += 1
            if len(self._opened) >= self._pool.max_open:
                self._opened.clear()
            self._opened.add(shard)
        info = self.shards[shard]
        return self._pool.open(
            info.url, num_samples=info.nsamples, dataset=EPath(parent_address(info.url))
        )

    def _transformed(self, sample: StreamSample) -> StreamSample:
        # Each caller gets its own streams, positioned at their beginning.
        changed: StreamSample = {
            name: io.BytesIO(value) if name.startswith(".") else value
            for name, value in sample.items()
        }
        for transform in self._transforms:
            changed = transform(changed)
        return changed


def _transforms(spec: Any, allowed: frozenset[str]) -> list[Transform]:
    if spec is None:
        return []
    transforms: list[Transform] = []
    for given in spec if isinstance(spec, list | tuple) else [spec]:
        if given in ("PIL", "pil", "numpy"):
            transforms.append(Decoding(given, allowed))
        elif callable(given):
            transforms.append(given)
        else:
            raise ConfigError(
                f'transformations={given!r}: expected "PIL", "numpy", or a function of samples'
            )
    return transforms


class _Sampler:
    """Counts the loops over it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next loop to `epoch`."""
        self.epoch = epoch


class ShardListSampler(_Sampler):
    """Yields the shards in random order, and the samples of each shard in random order.

    Args:
        dataset: A `ShardListDataset`, or anything with `lengths`.
        lengths: Lengths of the shards; None for those of the dataset.
        seed: Determines the order, together with the epoch.
        shufflefirst: Whether the shards are shuffled in the first epoch as well.
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

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        starts = [0, *accumulate(self.lengths)]
        shards = list(range(len(self.lengths)))
        if epoch > 0 or self.shufflefirst:
            shards = permuted(shards, derive_seed(self.seed, epoch))
        for shard in shards:
            numbers = list(range(starts[shard], starts[shard + 1]))
            yield from permuted(numbers, derive_seed(self.seed, epoch, shard))


ShardedSampler = ShardListSampler


class ChunkedSampler(_Sampler):
    """Yields chunks of consecutive samples in random order, shuffled within each chunk.

    Args:
        dataset: Anything with a length.
        num_samples: Number of samples from the first, or start and stop of a range; None for all.
        chunksize: Number of samples in a chunk.
        seed: Determines the order, together with the epoch.
        shuffle: Whether to shuffle.
        shufflefirst: Whether to shuffle in the first epoch as well.
        dslength_per_replica: Accepted for compatibility: the length is that of the range.

    Raises:
        ConfigError: If the range exceeds the dataset.
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
            raise ConfigError(f"num_samples={num_samples}: expected a range within 0 to {size}")
        if chunksize < 1:
            raise ConfigError(f"chunksize={chunksize}: expected 1 or more")
        self.chunksize = chunksize
        self.seed = seed
        self.shuffle = shuffle
        self.shufflefirst = shufflefirst

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        shuffled = self.shuffle and (epoch > 0 or self.shufflefirst)
        starts = list(range(self.start, self.stop, self.chunksize))
        if shuffled:
            starts = permuted(starts, derive_seed(self.seed, epoch))
        for start in starts:
            numbers = list(range(start, min(start + self.chunksize, self.stop)))
            yield from (
                permuted(numbers, derive_seed(self.seed, epoch, start)) if shuffled else numbers
            )


class DistributedChunkedSampler(ChunkedSampler):
    """Assigns each rank a part of the samples, the same number to all ranks.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None for that of torch.distributed or the environment.
        rank: This rank; None for that of torch.distributed or the environment.
        drop_last: Whether to drop samples that cannot be divided evenly; otherwise some samples
            are assigned to two ranks.
        chunksize: Number of samples in a chunk.
        kw: See `ChunkedSampler`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool | None = None,
        chunksize: int = 1_000_000,
        **kw: Any,
    ) -> None:
        worker = current_worker_info()
        self.num_replicas = worker.world_size if num_replicas is None else num_replicas
        self.rank = worker.rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"rank {self.rank}: expected 0 to {self.num_replicas - 1}")
        super().__init__(dataset, chunksize=chunksize, **kw)
        first, last, count = self.start, self.stop, self.num_replicas
        share = (last - first) // count if drop_last else -(-(last - first) // count)
        # The last parts overlap, so that all have the same length.
        self.start = max(first, min(first + self.rank * share, last - share))
        self.stop = min(self.start + share, last)
