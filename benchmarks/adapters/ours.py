"""energon itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    __version__,
    get_savable_loader,
    get_train_dataset,
)

Hook = Callable[[Any], Any]
VERSION = __version__


class Raw(DefaultTaskEncoder):
    """Passes undecoded samples on as lists."""

    decoder = None

    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


class Decoding(Raw):
    """Decodes them first."""

    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.hook = hook

    def encode_sample(self, sample: Any) -> Any:
        return self.hook(sample)


def loader(
    path: str, num_workers: int, batch_size: int, shuffle: int, hook: Hook | None = None
) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_train_dataset(
        path,
        worker_config=config,
        batch_size=batch_size,
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=100,
        task_encoder=Decoding(hook) if hook else Raw(),
    )
    return get_savable_loader(dataset)


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, hook: Hook | None = None
) -> Iterator[list[Any]]:
    yield from loader(path, num_workers, batch_size, shuffle, hook)
