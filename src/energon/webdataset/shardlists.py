"""Sources of shards, and who gets which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from energon.errors import ConfigError
from energon.formats.braces import expand_braces
from energon.plan.permutation import permute
from energon.webdataset.place import current_place
from energon.webdataset.stage import Context, Stage, StageIterator, State, unpack


def expand_urls(urls: str | Iterable[str]) -> list[str]:
    """Return the addresses that patterns stand for."""
    if isinstance(urls, str):
        return [url for part in urls.split("::") for url in expand_braces(part)]
    return list(urls)


class SimpleShardList(Stage):
    def __init__(self, urls, seed=None):
        self.urls = tuple(expand_urls(urls))
        self.seed = seed

    def __len__(self):
        return len(self.urls)

    def open(self, source, context):
        return iter([{"url": u} for u in self.urls])


@dataclass(frozen=True)
class ShuffleShards(Stage):
    """All shards of a finite list in an order that changes with every epoch."""

    def open(self, source, context):
        shards = list(source)
        n = len(shards)
        if not n:
            return iter(())
        key = np.array([context.seed_of(shared=True)], np.uint64)
        order = permute(np.arange(n), np.array([n]), key)
        return iter([shards[i] for i in order.tolist()])


def split_by_node(src, group=None):
    place = current_place(group)
    yield from islice(src, place.rank, None, place.world_size)


def split_by_worker(src):
    place = current_place()
    yield from islice(src, place.worker, None, place.num_workers)
