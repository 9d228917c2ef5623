"""webdataset: shards and samples shuffled, endlessly."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from typing import Any

import webdataset
from torch.utils.data import DataLoader

Hook = Callable[[Any], Any]
VERSION = webdataset.__version__


def same(samples: list[Any]) -> list[Any]:
    return samples


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, hook: Hook | None = None
) -> Iterator[list[Any]]:
    shards = sorted(glob.glob(f"{path}/*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=100, nodesplitter=None).shuffle(shuffle)
    if hook is not None:
        dataset = dataset.map(hook)
    dataset = dataset.batched(batch_size, collation_fn=same).repeat()
    yield from DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=same)
