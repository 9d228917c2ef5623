"""Load in several processes of a host; prints a line of JSON. See benchmarks/replicas.py."""

from __future__ import annotations

import io
import json
import mmap
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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

WARM_BATCHES, BATCHES, PACED_BATCHES = 6, 20, 15
STEP_SECONDS = 0.2
"""How long paced steps take, so that workers have made the next batch and wait."""
WAYS_OF_ONE_BATCH = ("replica", "tensors", "objects")
"""With which one process loads, and the others get its batch."""
WAYS_OF_ALL = ("replica", "each", "ranks", "shared")
"""With which every process has a loader; with "one", the others wait only."""


@edataclass
class ImageSample(Sample):
    """An image as an array."""

    image: torch.Tensor
    caption: str


@stateless
def cook(sample: Any) -> ImageSample:
    """Return a sample with its array as a tensor."""
    image = torch.from_numpy(np.load(io.BytesIO(sample["npy"])))
    return ImageSample(**basic_sample_keys(sample), image=image, caption=sample["__key__"])


class Encoder(DefaultTaskEncoder):
    """Stacks arrays."""

    decoder = None
    cookers = (Cooker(cook),)


SHARED_WORKERS = 2


def config_of(way: str, workers: int) -> WorkerConfig:
    """Return the config of a process, depending on how the batches come to it."""
    if way in ("ranks", "shared"):
        number = SHARED_WORKERS if way == "shared" else workers
        return WorkerConfig(
            rank=dist.get_rank(), world_size=dist.get_world_size(), num_workers=number, lanes=16
        )
    if way != "replica":
        return WorkerConfig(rank=0, world_size=1, num_workers=workers, lanes=4)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_shard", "tp"))
    return WorkerConfig.from_mesh(mesh, num_workers=workers, lanes=4)


def batches_of(way: str, folder: str, batch_size: int) -> Generator[tuple[Any, float]]:
    """Yield batches, and when the process that loads had each of them."""
    is_first = dist.get_rank() == 0
    loads = is_first or way in WAYS_OF_ALL
    loader: Any = iter(())
    if loads:
        config = config_of(way, 2)
        dataset = get_train_dataset(
            folder, worker_config=config, batch_size=batch_size, task_encoder=Encoder()
        )
        shared: Any = "host" if way == "shared" else None
        loader = iter(get_savable_loader(dataset, shared_workers=shared))
    while True:
        batch = next(loader) if loads else None
        had = time.perf_counter()
        if way == "objects":
            held = [batch]
            dist.broadcast_object_list(held, src=0)
            batch = held[0]
        elif way == "tensors":
            # As trainers do it: the sizes are known, and only tensors are sent.
            image = batch.image if is_first else torch.empty(batch_size, 3, 224, 224).byte()
            dist.broadcast(image, src=0)
            batch = image
        yield batch, had


class Exchange:
    """Lets processes wait for each other, and tell each other numbers.

    A collective operation of gloo would do as well, but its threads call epoll_wait over and over.
    With eight ranks, this took 4 to 7 ms of CPU time a step with workers of each, and 13 to 25 ms
    with shared ones, which leave more cores free.
    """

    def __init__(self, processes: int) -> None:
        self._barrier = multiprocessing.get_context("fork").Barrier(processes)
        self._numbers = np.frombuffer(mmap.mmap(-1, 2 * processes * 3 * 8)).reshape(2, -1, 3)
        self._turn = 0

    def __call__(self, *numbers: float) -> list[list[float]]:
        """Wait for all processes, and return the three numbers of each."""
        self._turn = 1 - self._turn  # others may still read those of the turn before
        numbers_of_turn = self._numbers[self._turn]
        numbers_of_turn[dist.get_rank()] = numbers
        self._barrier.wait()
        return numbers_of_turn.tolist()


def main(exchange: Exchange, way: str, folder: str, batch_size: int) -> dict[str, float]:
    """Take batches as fast as they come, then paced; return the figures of all processes."""
    delays: list[tuple[float, float]] = []
    batches = batches_of(way, folder, batch_size)
    for number, (batch, loaded) in enumerate(batches):
        had = time.perf_counter()
        if batch is not None:
            image = batch if way == "tensors" else batch.image
            image.reshape(-1)[:: 1 << 12].sum()  # touches all pages
        everyone = exchange(loaded, had, time.perf_counter())
        if number == WARM_BATCHES - 1:
            begun, cpu = time.perf_counter(), cpu_seconds()
        if number == WARM_BATCHES + BATCHES - 1:
            seconds = time.perf_counter() - begun
            used = [cpu_seconds() - cpu, *map(memory_bytes, (processes(), processes()[1:]))]
        if number >= WARM_BATCHES + BATCHES:
            loaded, _, read = everyone[0]
            had_last, read_last = (max(at[i] for at in everyone[1:]) for i in (1, 2))
            delays.append((had_last - loaded, read_last - read))
        if number >= WARM_BATCHES + BATCHES - 1:
            if way in WAYS_OF_ONE_BATCH and len(delays) < PACED_BATCHES:
                time.sleep(STEP_SECONDS)
            else:
                break
    everyone = exchange(*used)
    batches.close()
    figures = {
        "batches_per_second": BATCHES / seconds,
        "cpu_ms_per_batch": 1000 * sum(each[0] for each in everyone) / BATCHES,
        "memory_mb": sum(each[1] for each in everyone) / 1e6,
        "workers_mb": sum(each[2] for each in everyone) / 1e6,
    }
    if delays:
        had_ms, read_ms = (1000 * np.median(np.array(delays), axis=0)).tolist()
        figures |= {"delay_ms": had_ms, "read_delay_ms": read_ms}
    return figures


def processes() -> list[int]:
    """Return the ids of this process and of its workers."""
    children = [
        int(pid)
        for path in Path("/proc/self/task").glob("*/children")  # each thread has its own
        for pid in path.read_text().split()
    ]
    return [os.getpid(), *children]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers."""
    total = 0.0
    for pid in processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def memory_bytes(pids: list[int]) -> int:
    """Return the memory of processes; what they share with others counts in parts."""
    lines = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
    return sum(
        1024 * int(line.split()[1]) for each in lines for line in each if line.startswith("Pss:")
    )


def run(rank: int, number: int, store: str, exchange: Exchange, arguments: list[str]) -> int:
    """Be one of the processes; the first one prints the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=number)
    way, folder, batch_size = arguments
    figures = main(exchange, way, folder, int(batch_size))
    if rank == 0:
        sys.stdout.write(f"{json.dumps(figures)}\n")
        sys.stdout.flush()
    dist.barrier()
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    count = int(sys.argv[1])
    exchange = Exchange(count)
    with tempfile.TemporaryDirectory() as place:
        pids = []
        for rank in range(count):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    code = run(rank, count, f"{place}/store", exchange, sys.argv[2:])
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(codes, key=abs))
