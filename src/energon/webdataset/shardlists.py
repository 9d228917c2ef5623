"""Sources of shards, their order, and their distribution to ranks and workers."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

from energon.errors import ConfigError, EmptyDatasetError
from energon.plan.randomness import derive_seed, permute
from energon.webdataset.reading.urls import envlookup, envsubst, expand_source, expand_urls
from energon.webdataset.running.place import Place, TorchLookalike, current_place
from energon.webdataset.stages.base import Context, SplitAxis, Stage
from energon.webdataset.stages.shuffling import default_seed, make_draws
from energon.webdataset.utils import pytorch_worker_seed, reexport

__all__ = [
    "DealShards",
    "ResampledShardList",
    "ResampledShards",
    "ShuffleShards",
    "SimpleShardList",
    "envlookup",
    "envsubst",
    "expand",
    "expand_source",
    "expand_urls",
    "non_empty",
    "resampled",
    "single_node_only",
    "split_by_node",
    "split_by_worker",
]

logger = logging.getLogger("energon")

Shard = dict[str, Any]


class ShardSource(TorchLookalike, Stage):
    """A source with a fixed list of shards.

    Attributes:
        urls: The shards, which a program may change between loops.
        epoch: Number of iterations over it outside of a pipeline, from -1. Pipelines count their
            epochs themselves.
    """

    urls: list[str]
    epoch = -1

    def __len__(self) -> int:
        return len(self.urls)

    def __iter__(self) -> Iterator[Shard]:
        self.epoch += 1
        return self.open(iter(()), Context(current_place(), epoch=self.epoch))

    def describe(self) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(self.urls).encode(), digest_size=8).hexdigest()
        return {"stage": type(self).__name__, "shards": len(self.urls), "names": digest}


class SimpleShardList(ShardSource):
    """Yields each shard once.

    Args:
        urls: Patterns, folders, or a list of these; see `expand_urls`.
        seed: Shuffles them, differently in each epoch; None keeps their order.

    Example:
        >>> list(SimpleShardList("{a,b}.tar"))
        [{'url': 'a.tar'}, {'url': 'b.tar'}]
    """

    def __init__(self, urls: Any, seed: int | None = None) -> None:
        self.urls = list(expand_urls(urls))
        self.seed = None if seed is None else default_seed(seed)

    @property
    def is_random(self) -> bool:
        return self.seed is not None

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        shards = [{"url": url} for url in self.urls]
        if self.seed is None:
            return iter(shards)
        return iter(permuted(shards, derive_seed(self.seed, context.epoch)))


class ResampledShards(ShardSource):
    """Yields shards drawn at random with replacement, independently in each worker.

    Args:
        urls: Patterns, folders, or a list of these; see `expand_urls`.
        nshards: Number of draws.
        seed: Distinguishes sources that draw from the same shards.
        worker_seed: Returns a seed for the worker that calls it; None derives it from rank and
            worker.
        deterministic: Whether sources with the same seed draw the same shards outside of a
            pipeline. In a pipeline, draws are always a function of seed, epoch and worker.
        max_urls: Maximum number of shards.
        empty_check: Accepted for compatibility: an empty list is always an error.

    Example:
        >>> drawn = list(ResampledShards("{a,b}.tar", nshards=100))
        >>> len(drawn), {shard["url"] for shard in drawn} == {"a.tar", "b.tar"}
        (100, True)
    """

    is_endless = is_random = True

    def __init__(
        self,
        urls: Any,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Any = None,
        deterministic: bool = False,
        max_urls: float = 1e6,
        empty_check: bool = True,
    ) -> None:
        self.urls = list(expand_source(urls, max_urls))
        self.nshards = nshards
        self.deterministic = deterministic
        self.seed = default_seed(seed)
        self.worker_seed = worker_seed or pytorch_worker_seed
        self._own = 0 if deterministic else next(_numbers)

    def __iter__(self) -> Iterator[Shard]:
        self.epoch += 1
        return self.open(iter(()), Context(current_place(), seed=self._own, epoch=self.epoch))

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Shard]:
        is_own = self.worker_seed is not pytorch_worker_seed
        worker = (int(self.worker_seed()),) if is_own else ()
        draws = make_draws(
            None, lambda block: context.seed_of(self.seed, *worker, block, shared=False)
        )
        shown = os.environ.get("WDS_SHOW_SEED", "0") not in ("", "0")
        seed = context.seed_of(self.seed, *worker, shared=False)
        level = logging.INFO if shown else logging.DEBUG
        logger.log(level, "drawing from %d shards with seed %d", len(self.urls), seed)
        numbers = range(self.nshards) if self.nshards < sys.maxsize else count()
        return ({"url": self.urls[draws.below(len(self.urls))]} for _ in numbers)


ResampledShardList = ResampledShards
_numbers = count(1)
"""Numbers sources that draw, in the order in which the program creates them."""


def resampled_(src: Iterable[Any], n: int = sys.maxsize) -> Iterator[Any]:
    """Yield `n` random items of an iterable, which is first read to its end."""
    yield from resampled(n)(src)


@dataclass(frozen=True)
class ShuffleShards(Stage):
    """Yields all shards in an order that changes with every epoch.

    Args:
        same_for_all: Whether all ranks get the same order whatever their seeds, so that they can
            divide the shards afterwards.
    """

    is_random = True

    same_for_all: bool = False

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        seed = context.seed_of()
        if self.same_for_all:
            seed = derive_seed("shards of all ranks", context.epoch)
        return iter(permuted(list(source), seed))


@dataclass(frozen=True)
class DealShards(Stage):
    """Divides the shards among the workers, so that together they read each shard once.

    If there are fewer shards than workers, several workers share a shard: each of m workers
    takes every m-th sample of it.

    Args:
        by_node: Whether to divide the shards among ranks; otherwise each rank gets all of them.
        by_worker: Whether to divide the shards of a rank among its workers.
    """

    by_node: bool = True
    by_worker: bool = True

    @property
    def splits(self) -> frozenset[SplitAxis]:
        splits: list[SplitAxis] = []
        if self.by_node:
            splits.append("rank")
        if self.by_worker:
            splits.append("worker")
        return frozenset(splits)

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        if not context.divides:
            return source
        shards = list(source)
        place = context.place
        if self.by_node:
            shards = list(deal(shards, place.rank, place.world_size))
        return deal(shards, place.worker, place.num_workers) if self.by_worker else iter(shards)


def deal(shards: list[Any], number: int, count: int) -> Iterator[Any]:
    """Return the shards of worker `number` of `count`."""
    if len(shards) >= count or not shards:
        return islice(shards, number, None, count)
    shard = shards[number % len(shards)]
    sharing = len(range(number % len(shards), count, len(shards)))
    return iter([_shared(shard, number // len(shards), sharing)])


def _shared(shard: Any, number: int, count: int) -> Shard:
    shard = {"url": shard} if isinstance(shard, str) else dict(shard)
    before, parts = shard.get("share", (0, 1))
    return {**shard, "share": (before + number * parts, parts * count)}


def permuted(items: list[Any], seed: int) -> list[Any]:
    """Return the items in an order that is a function of a seed."""
    if len(items) < 2:
        return items
    numbers = np.arange(len(items))
    places = permute(numbers, np.array([len(items)]), np.array([seed], np.uint64))
    return [items[place] for place in places.tolist()]


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield every n-th item, where n is the number of ranks.

    Example:
        >>> list(split_by_node("ab"))  # there is one node
        ['a', 'b']
    """
    place = current_place(group)
    yield from islice(src, place.rank, None, place.world_size)


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Yield every n-th item, where n is the number of loader workers of this rank.

    Example:
        >>> list(split_by_worker("ab"))  # outside of loaders
        ['a', 'b']
    """
    place = current_place()
    yield from islice(src, place.worker, None, place.num_workers)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """Yield all items, if this is the only rank.

    Raises:
        ConfigError: If there are several ranks, which would all get the same items.

    Example:
        >>> list(single_node_only("ab"))
        ['a', 'b']
    """
    place: Place = current_place(group)
    if place.world_size > 1:
        raise ConfigError(
            f"there are {place.world_size} ranks, but nodesplitter=single_node_only allows only "
            "one; leave nodesplitter out to share the shards among them"
        )
    yield from src


@dataclass(frozen=True)
class _Resampled(Stage):
    n: int

    is_endless = is_random = True

    def open(self, source: Iterator[Any], context: Context) -> Iterator[Any]:
        items = list(source)
        if not items:
            raise EmptyDatasetError("there is nothing to draw from: the source is empty")
        draws = make_draws(None, partial(context.seed_of, shared=False))
        return (items[draws.below(len(items))] for _ in range(self.n))


def resampled(n: int = sys.maxsize) -> Stage:
    """Return a stage that reads its whole source and yields `n` random items of it.

    Example:
        >>> len(list(resampled(5)("ab")))
        5
    """
    return _Resampled(n)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """Yield all items.

    Raises:
        EmptyDatasetError: If there are none.

    Example:
        >>> list(non_empty("ab"))
        ['a', 'b']
    """
    is_empty = True
    for item in src:
        is_empty = False
        yield item
    if is_empty:
        raise EmptyDatasetError("the pipeline yielded nothing")


def expand(s: str) -> str:
    """Return a path with the home folder (`~`) and environment variables (`$NAME`) expanded."""
    return os.path.expanduser(os.path.expandvars(s))


__getattr__ = reexport(
    __name__,
    {
        "DirectoryShardList": "reading.shard_sources",
        "MSSource": "reading.shard_sources",
        "MultiShardSample": "reading.shard_sources",
        "check_pid_is_running": "reading.shard_sources",
        "get_pid_from_filename": "reading.shard_sources",
        "utils": "utils:",
        "without_last_extension": "reading.shard_sources",
        "is_iterable": "utils",
        "obsolete": "utils",
        "pipelinefilter": "filters",
        "shardspec": "reading.shard_sources",
    },
)
