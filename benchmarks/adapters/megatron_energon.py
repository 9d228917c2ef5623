"""Megatron-Energon: crude samples, decoding off, a cooker that passes them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    __version__,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

Hook = Callable[[Any], Any]
VERSION = __version__


@stateless
def pass_on(sample: Any) -> Any:
    return sample


class Raw(DefaultTaskEncoder):
    decoder = None
    cookers = [Cooker(pass_on)]  # noqa: RUF012 - as its documentation has it

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return samples


class Decoding(Raw):
    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.hook = hook

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        return self.hook(sample)


def batches(
    path: str, num_workers: int, batch_size: int, shuffle: int, hook: Hook | None = None
) -> Iterator[list[Any]]:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers)
    dataset = get_train_dataset(
        path,
        worker_config=config,
        batch_size=batch_size,
        shuffle_buffer_size=shuffle,
        max_samples_per_sequence=100,
        task_encoder=Decoding(hook) if hook else Raw(),
    )
    yield from get_savable_loader(dataset)
