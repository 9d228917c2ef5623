"""Copy batches to a GPU and train there; prints a line of JSON. See benchmarks/pinned.py."""

from __future__ import annotations

import glob
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

SIDE, BATCH = 224, 64
WARM_SECONDS, SECONDS = 1.0, 2.0


def image_of(content: bytes, kind: str) -> torch.Tensor:
    """Return a stored array as a tensor of this type."""
    array = np.load(io.BytesIO(content))
    return torch.from_numpy(array if kind == "uint8" else array.astype(np.float32))


def batches_with_task_encoder(
    energon: Any, path: str, workers: int, kind: str
) -> Iterator[torch.Tensor]:
    """Yield the batches of the two loaders that have task encoders."""

    @energon.stateless
    def cook(sample: Any) -> Any:
        return energon.CaptioningSample(
            **energon.basic_sample_keys(sample),
            image=image_of(sample["npy"], kind),
            caption=sample["__key__"],
        )

    class Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc,name-defined]
        decoder = None
        cookers = [energon.Cooker(cook)]  # noqa: RUF012 - as the documentation of both has it

    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = energon.get_train_dataset(
        path,
        worker_config=config,
        batch_size=BATCH,
        task_encoder=Encoder(),
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
    )
    for batch in energon.get_savable_loader(dataset):
        yield batch.image


def batches_of_stream(path: str, workers: int, kind: str) -> Iterator[torch.Tensor]:
    """Yield the batches of webdataset."""
    wds = import_module("webdataset")
    shards = sorted(glob.glob(f"{path}/shards/*.tar"))
    dataset = (
        wds.WebDataset(shards, shardshuffle=100, nodesplitter=None)
        .shuffle(100)
        .map(lambda sample: (image_of(sample["npy"], kind),))
        .batched(BATCH, collation_fn=lambda samples: torch.stack([each for (each,) in samples]))
    )
    yield from wds.WebLoader(
        dataset.repeat(), batch_size=None, num_workers=workers, pin_memory=True
    )


def batches_of(loader: str, path: str, workers: int, kind: str) -> Iterator[torch.Tensor]:
    """Yield the batches of a loader."""
    if loader == "none":
        dtype = getattr(torch, kind)
        yield from repeat(torch.ones((BATCH, 3, SIDE, SIDE), dtype=dtype).pin_memory())
    elif loader == "web_dataset":
        yield from batches_of_stream(path, workers, kind)
    elif loader == "megatron_energon":
        energon = import_module("megatron.energon")
        yield from batches_with_task_encoder(energon, path, workers, kind)
    else:
        energon = import_module("energon")
        yield from batches_with_task_encoder(energon, path, workers, kind)


def make_step(milliseconds: float) -> Callable[[], None]:
    """Return a function that queues work for about this long on the device."""
    weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def run(number: int) -> None:
        for _ in range(number):
            torch.matmul(weights, weights)

    run(20)
    alone = seconds_of(lambda: run(30)) / 30
    number = max(1, round(milliseconds / 1000 / alone))
    return lambda: run(number)


def seconds_of(queue: Callable[[], object]) -> float:
    """Return how long the device takes for what a function queues."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    queue()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


class Trained(NamedTuple):
    """What was done in some seconds."""

    seconds: float
    steps: int
    moved_bytes: int
    blocked_seconds: float


def train(batches: Iterator[torch.Tensor], step: Callable[[], None], seconds: float) -> Trained:
    """Copy batches to the device and train on them there for some seconds."""
    steps = moved = 0
    blocked = 0.0
    torch.cuda.synchronize()
    queued: Any = torch.cuda.Event()
    begun = time.perf_counter()
    while (asked := time.perf_counter()) - begun < seconds:
        images = next(batches).to("cuda", non_blocking=True)
        blocked += time.perf_counter() - asked
        # As in programs that log the loss of the previous step, one step is queued at most.
        queued.synchronize()
        step()
        queued.record()
        steps += 1
        moved += images.nbytes
    torch.cuda.synchronize()
    return Trained(time.perf_counter() - begun, steps, moved, blocked)


def main() -> None:
    """Measure one loader."""
    path, milliseconds, kind, workers, loader = sys.argv[1:]
    step = make_step(float(milliseconds))
    alone = min(seconds_of(lambda: [step() for _ in range(10)]) / 10 for _ in range(3))
    batches = batches_of(loader, path, int(workers), kind)
    next(batches)
    train(batches, step, WARM_SECONDS)
    training = train(batches, step, SECONDS)
    train(batches, lambda: None, WARM_SECONDS)
    copies = train(batches, lambda: None, SECONDS)
    found = {
        "gigabytes_per_second": copies.moved_bytes / copies.seconds / 1e9,
        "blocked_ms": training.blocked_seconds / training.steps * 1000,
        "of_the_speed": alone * training.steps / training.seconds,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # workers of some libraries do not end by themselves


if __name__ == "__main__":
    main()
