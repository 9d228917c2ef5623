"""webdataset: shards and samples shuffled, endlessly."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from typing import Any

import webdataset
from torch.utils.data import DataLoader

VERSION = webdataset.__version__


def same(samples: list[Any]) -> list[Any]:
    return samples


def batches(path: str, num_workers: int, batch_size: int, shuffle: int) -> Iterator[list[Any]]:
    shards = sorted(glob.glob(f"{path}/*.tar"))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=100, nodesplitter=None)
        .shuffle(shuffle)
        .batched(batch_size, collation_fn=same)
        .repeat()
    )
    yield from DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=same)
