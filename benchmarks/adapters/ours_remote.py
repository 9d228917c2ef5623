"""energon itself, reading a bucket by slices of 64 samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    __version__,
    get_savable_loader,
    get_train_dataset,
)

VERSION = __version__


class Raw(DefaultTaskEncoder):
    """Passes undecoded samples on as lists."""

    decoder = None

    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


def batches(path: str, num_workers: int, batch_size: int, shuffle: int) -> Iterator[list[Any]]:
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=batch_size,
        max_samples_per_sequence=64,
        task_encoder=Raw(),
    )
    yield from get_savable_loader(dataset)
