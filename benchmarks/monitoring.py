"""Measure what it costs that a loader is watched: its figures, and the profiler behind them.

    python benchmarks/monitoring.py [--blocks N]

The same raw samples are read in-line in chunks of equally many batches, which are watched or not;
times are CPU seconds of this process. Others may use the machine, so four chunks of a tenth of a
second make a block (off, on, on, off, or the other way round), in which slow drifts cancel, and
the mean of all blocks but the outer fifths is given with its standard error. 300 blocks resolve
0.2 % or so. Samples are small and nothing is done with them, so what watching takes is as large a
share as it can be.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import data
from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.loader.monitoring.profiler import PERIOD_SECONDS, profiler
from energon.prepare.dataset import prepare_dataset

BATCH_SIZE = 32
CHUNK_SECONDS = 0.1
TRIMMED = 0.2
"""Of the blocks, this share is left out at either end: something else has disturbed them."""


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


class Comparison:
    """Takes chunks of batches, watched or not.

    Args:
        loader: Whose batches.
    """

    def __init__(self, loader: Any) -> None:
        self.watch = Watch()
        self.loader = loader
        self.batches = iter(loader)
        self.chunk = 1
        self.next_look = 0.0
        self.chunk = self._calibrated()

    def seconds(self, *, watched: bool) -> float:
        """Return the CPU seconds that a chunk takes."""
        monitor = self.loader._monitor
        monitor.next_look = self.next_look if watched else math.inf
        self.watch.wanted.set() if watched else self.watch.wanted.clear()
        start = time.process_time()
        for _ in range(self.chunk):
            next(self.batches)
        taken = time.process_time() - start
        self.next_look = monitor.next_look if watched else self.next_look
        return taken

    def block(self, first: bool) -> tuple[float, float]:
        """Return the CPU seconds of two chunks that are not watched, and of two that are."""
        found = {False: 0.0, True: 0.0}
        for watched in (first, not first, not first, first):
            found[watched] += self.seconds(watched=watched)
        return found[False], found[True]

    def _calibrated(self) -> int:
        """Return how many batches take as long as a chunk."""
        for _ in range(500):
            next(self.batches)
        number, start = 0, time.process_time()
        while time.process_time() - start < 1:
            next(self.batches)
            number += 1
        return max(1, int(number * CHUNK_SECONDS))


def trimmed_mean(numbers: list[float]) -> tuple[float, float]:
    """Return the mean without what is left out at either end, and its standard error."""
    inner = sorted(numbers)[(cut := int(TRIMMED * len(numbers))) : len(numbers) - cut]
    # Of a trimmed mean: from the spread of all numbers, with those at the ends pulled in.
    pulled = [min(max(number, inner[0]), inner[-1]) for number in numbers]
    return mean(inner), stdev(pulled) / ((1 - 2 * TRIMMED) * math.sqrt(len(numbers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300)
    arguments = parser.parse_args()
    logging.getLogger("energon").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        data.write(Path(folder), "text", num_samples=20_000, num_shards=4)
        prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
        dataset = get_train_dataset(
            folder, worker_config=config, batch_size=BATCH_SIZE, task_encoder=Raw()
        )
        comparison = Comparison(get_loader(dataset))
        gc.freeze()
        blocks = [comparison.block(number % 2 == 0) for number in range(arguments.blocks)]
    samples = 2 * comparison.chunk * BATCH_SIZE
    for name, taken in zip(("not watched", "watched"), zip(*blocks, strict=True), strict=True):
        sys.stdout.write(f"{name}: {1e6 * median(taken) / samples:.3f} us of CPU a sample\n")
    ratio, error = trimmed_mean([watched / alone for alone, watched in blocks])
    look = comparison.watch.seconds / comparison.watch.looks
    share = 100 * look / PERIOD_SECONDS
    sys.stdout.write(
        f"difference: {100 * (ratio - 1):.2f} % +- {100 * error:.2f} %\n"
        f"a look takes {1e6 * look:.0f} us, every {1e3 * PERIOD_SECONDS:.0f} ms: {share:.2f} %\n"
    )


if __name__ == "__main__":
    main()
