"""The programs over plain shards: the same text for energon.webdataset and for webdataset."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from typing import Any

from adapters.programs import SAMPLE_HOOKS


def same(samples: list[Any]) -> list[Any]:
    """Return a list as it is."""
    return samples


def batches(
    wds: Any, path: str, num_workers: int, batch_size: int, shuffle: int, program: str
) -> Iterator[Any]:
    """Yield the batches of a program, shards and samples shuffled, endlessly."""
    shards = sorted(glob.glob(f"{path}/*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=100, nodesplitter=None).shuffle(shuffle)
    if program == "stream":
        dataset = dataset.decode().to_tuple("txt", "json").batched(batch_size)
    elif program == "typed":
        dataset = dataset.decode("torchrgb").to_tuple("jpg", "txt").batched(batch_size)
    else:
        hook = SAMPLE_HOOKS[program]
        dataset = dataset if hook is None else dataset.map(hook)
        dataset = dataset.batched(batch_size, collation_fn=same)
    yield from wds.WebLoader(
        dataset.repeat(), batch_size=None, num_workers=num_workers, collate_fn=same
    )
