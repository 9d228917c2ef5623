"""Take batches from workers on Ray, or from Ray Data; prints a line of JSON.

See benchmarks/ray_workers.py.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from adapters.thumbnail import thumbnail
from energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from measure import process_tree

WORKERS, BATCH_SIZE = 2, 128
WARM_BATCHES, BATCHES = 8, 20
PASSES = 10
STEP_SECONDS = 0.1
"""A step of training, in which workers have the time to make the next batches."""
SETUP_SECONDS = 5.0
"""How long a program sets up its model, after it has built its loader."""

IMPORT = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"


@edataclass
class ImageSample(Sample):
    """An image."""

    image: torch.Tensor


def image_of(sample: Any) -> Any:
    """Return the array of the image of a sample, a JPEG or an array."""
    return thumbnail(sample["jpg"]) if "jpg" in sample else np.load(io.BytesIO(sample["npy"]))


@stateless
def cook(sample: Any) -> ImageSample:
    """Return a sample with its image as a tensor."""
    return ImageSample(**basic_sample_keys(sample), image=torch.tensor(image_of(sample)))


class Encoder(DefaultTaskEncoder):
    """Stacks images."""

    decoder = None
    cookers = (Cooker(cook),)


def loader_of(workers: Any, folder: str) -> Any:
    """Return a loader of energon."""
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=WORKERS, lanes=4),
        batch_size=BATCH_SIZE,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )
    return get_savable_loader(dataset, workers=workers)


def ray_data_batches(kind: str, folder: str) -> Iterator[Any]:
    """Return batches of Ray Data, decoded as its reader reads: `map` afterwards is slower."""
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    shards = [str(path) for path in sorted(Path(folder).rglob("*.tar"))]
    images = ray.data.read_webdataset(
        shards * PASSES,
        suffixes=[kind],
        decoder=lambda sample: {"image": image_of(sample)},
    )
    return iter(images.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=2))


def images_of(batches: Iterator[Any]) -> Iterator[torch.Tensor]:
    """Yield the images of batches."""
    for batch in batches:
        yield batch["image"] if isinstance(batch, dict) else batch.image


def speed_of(batches: Iterator[torch.Tensor]) -> dict[str, float]:
    """Return how fast batches come."""
    begun, images = time.perf_counter(), 0
    for batch in islice(batches, BATCHES):
        images += len(batch)
    return {"images_per_second": images / (time.perf_counter() - begun)}


def cost_of(batches: Iterator[torch.Tensor]) -> dict[str, float]:
    """Return how long the trainer is blocked by a batch that is ready, and its CPU time."""
    blocked, used = [], time.process_time()
    for _ in range(BATCHES):
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        next(batches)
        blocked.append(time.perf_counter() - asked)
    used = time.process_time() - used
    return {"blocked_ms": 1000 * median(blocked), "trainer_cpu_ms": 1000 * used / BATCHES}


def restored(how: str, folder: str, setup_seconds: float) -> dict[str, float]:
    """Return how long the first batch after a restore takes, connected to a running cluster.

    The time begins before the loader is built, and that for which `next` blocks when the program
    has set up its model.
    """
    state = json.load(sys.stdin)
    if how == "ray":
        import ray

        ray.init(log_to_driver=False)
    begun = time.perf_counter()
    with loader_of(how, folder) as loader:
        loader.load_state_dict(state)
        time.sleep(setup_seconds)
        batches, asked = iter(loader), time.perf_counter()
        next(batches)
        now = time.perf_counter()
    return (
        {"restore_wait_seconds": now - asked} if setup_seconds else {"restore_seconds": now - begun}
    )


def printed_by(*arguments: str, given: str = "") -> str:
    """Return the last line that another program prints."""
    done = subprocess.run(
        [sys.executable, *arguments], check=True, input=given, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.splitlines()[-1]


def main(how: str, kind: str, folder: str) -> dict[str, float]:
    """Take batches, and return the figures."""
    torch.set_num_threads(1)
    if how != "process":
        import ray

        ray.init("local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    loader = None if how == "ray_data" else loader_of(how, folder)
    batches = images_of(ray_data_batches(kind, folder) if loader is None else iter(loader))
    for _ in islice(batches, WARM_BATCHES):
        pass
    if kind != "restore":
        figures = speed_of(batches)
        return figures | (cost_of(batches) if kind == "npy" else {})
    figures = {"import_seconds": float(printed_by("-c", IMPORT))}
    if loader is not None:
        state = json.dumps(loader.state_dict())
        loader.close()
        for setup_seconds in (0.0, SETUP_SECONDS):
            program = (__file__, "restored", how, folder, str(setup_seconds))
            figures |= json.loads(printed_by(*program, given=state))
    return figures


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.argv[1] == "restored":
        found = restored(*sys.argv[2:4], float(sys.argv[4]))
    else:
        found = main(*sys.argv[1:])
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    for pid in process_tree()[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)
