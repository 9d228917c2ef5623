"""Copy batches to a GPU and train there; prints a line of JSON. See benchmarks/pinned.py."""

from __future__ import annotations

import glob
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import repeat
from typing import Any

import numpy as np
import torch

SIDE, BATCH = 224, 64
WARM_SECONDS, SECONDS = 2.0, 3.0


def image_of(content: bytes, kind: str) -> torch.Tensor:
    """Return a stored array as a tensor of this type."""
    array = np.load(io.BytesIO(content))
    return torch.from_numpy(array if kind == "uint8" else array.astype(np.float32))


def batches_with_task_encoder(
    energon: Any, path: str, workers: int, kind: str, **options: Any
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
    for batch in energon.get_savable_loader(dataset, **options):
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
    if loader == "limit":
        dtype = getattr(torch, kind)
        yield from repeat(torch.ones((BATCH, 3, SIDE, SIDE), dtype=dtype).pin_memory())
    elif loader == "web_dataset":
        yield from batches_of_stream(path, workers, kind)
    elif loader == "megatron_energon":
        energon = import_module("megatron.energon")
        yield from batches_with_task_encoder(energon, path, workers, kind)
    else:
        energon = import_module("energon")
        pins = {"pin_memory": False} if loader == "ours-unpinned" else {}
        yield from batches_with_task_encoder(energon, path, workers, kind, **pins)


def make_step(milliseconds: float) -> Any:
    """Return a function that queues work for about this long on the device."""
    weights = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def run(number: int) -> None:
        for _ in range(number):
            torch.matmul(weights, weights)

    run(20)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run(50)
    torch.cuda.synchronize()
    number = round(milliseconds / ((time.perf_counter() - begun) / 50 * 1000))
    return lambda: run(number)


def main() -> None:
    """Measure one loader."""
    path, milliseconds, _, kind, workers, loader = sys.argv[1:]
    step = make_step(float(milliseconds))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(50):
        step()
        torch.cuda.synchronize()
    alone = (time.perf_counter() - begun) / 50
    batches = batches_of(loader, path, int(workers), kind)
    next(batches)
    load, priority = os.getloadavg()[0], -os.getpriority(os.PRIO_PROCESS, 0)

    def train(seconds: float) -> tuple[int, int, float, float]:
        steps = moved = 0
        blocked = 0.0
        done = torch.cuda.Event()
        done.record()
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            asked = time.perf_counter()
            images = next(batches).to("cuda", non_blocking=True)
            blocked += time.perf_counter() - asked
            # As trainers that read the loss of the step before: at most one step is queued.
            done.synchronize()
            step()
            done = torch.cuda.Event()
            done.record()
            steps += 1
            moved += images.nbytes
        torch.cuda.synchronize()
        return steps, moved, blocked, time.perf_counter() - begun

    train(WARM_SECONDS)
    steps, moved, blocked, seconds = train(SECONDS)
    found = {
        "gigabytes_per_second": moved / seconds / 1e9,
        "blocked_ms": blocked / steps * 1000,
        "of_the_steps": alone * steps / seconds,
        "load_before": load,
        "priority": priority,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
