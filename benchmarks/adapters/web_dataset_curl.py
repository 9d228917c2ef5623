"""webdataset over `pipe:curl`: shards in random order, samples through its buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import webdataset
from torch.utils.data import DataLoader

from adapters.streams import same

VERSION = webdataset.__version__


def batches(path: str, num_workers: int, batch_size: int, shuffle: int) -> Iterator[list[Any]]:
    dataset = (
        webdataset.WebDataset(f"pipe:curl -s -L {path}", shardshuffle=100, nodesplitter=None)
        .shuffle(shuffle)
        .batched(batch_size, collation_fn=same)
        .repeat()
    )
    yield from DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=same)
