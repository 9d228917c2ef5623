"""Measure what it costs that a loader is watched: its figures, and the profiler behind them.

    python benchmarks/monitoring.py [--rounds N]

The same raw samples are read in-line, in chunks that are watched and chunks that are not, in turns;
times are CPU seconds of this process. As others may use the machine, each chunk is compared with
its neighbour of the other kind, and the median of all pairs is given with its error. Samples are
small and nothing is done with them, so what watching takes is as large a share as it can be.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, stdev

import data
from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.loader.monitoring.profiler import PERIOD_SECONDS, profiler
from energon.prepare.dataset import prepare_dataset

BATCH_SIZE = 32
CHUNK_SECONDS = 0.2


class Raw(DefaultTaskEncoder):
    """Hands samples on as they are in the shards."""

    decoder = None

    def encode_sample(self, sample: object) -> object:
        return sample

    def batch(self, samples: list[object]) -> list[object]:
        return samples


class Watch:
    """Drives the profiler while it is wanted, and knows what that has taken."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self.looks, self.seconds = 0, 0.0
        profiler().drive()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.wanted.wait():
            time.sleep(PERIOD_SECONDS)
            start = time.thread_time()
            profiler().look()
            self.seconds += time.thread_time() - start
            self.looks += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    watch = Watch()
    found: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        data.write(Path(folder), "text", num_samples=20_000, num_shards=4)
        prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
        dataset = get_train_dataset(
            folder, worker_config=config, batch_size=BATCH_SIZE, task_encoder=Raw()
        )
        loader = get_loader(dataset)
        batches = iter(loader)
        for _ in range(500):
            next(batches)
        next_look = 0.0
        for number in range(2 * arguments.rounds):
            watched = number % 4 in (0, 3)
            watch.wanted.set() if watched else watch.wanted.clear()
            loader._monitor.next_look = next_look if watched else math.inf
            begun, start, count = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - begun < CHUNK_SECONDS:
                for _ in range(50):
                    next(batches)
                count += 50 * BATCH_SIZE
            next_look = loader._monitor.next_look if watched else next_look
            found[watched].append(1e6 * (time.process_time() - start) / count)
    for watched, name in ((False, "not watched"), (True, "watched")):
        sys.stdout.write(f"{name}: {median(found[watched]):.3f} us of CPU a sample\n")
    ratios = [yes / no for yes, no in zip(found[True], found[False], strict=True)]
    error = 1.25 * stdev(ratios) / math.sqrt(len(ratios))
    difference = f"{100 * (median(ratios) - 1):.2f} % +- {100 * error:.2f} %"
    look = watch.seconds / watch.looks
    share = 100 * look / PERIOD_SECONDS
    sys.stdout.write(
        f"difference: {difference}\n"
        f"a look takes {1e6 * look:.0f} us, every {1e3 * PERIOD_SECONDS:.0f} ms: {share:.2f} %\n"
    )


if __name__ == "__main__":
    main()
