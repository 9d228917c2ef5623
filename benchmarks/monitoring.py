"""Measure what it costs that a loader is watched: figures, looks, and batches that are measured.

    python benchmarks/monitoring.py [--blocks N] [--kind inline thread process]

The same raw samples are read in the training process, by two threads, or by a worker process, in
chunks during which the loader is watched or not; times are CPU seconds of the process that reads.
Others may use the machine, so four chunks of a tenth of a second make a block (off, on, on, off,
or the other way round), in which slow drifts cancel, and the mean of all blocks but the outer
fifths is given with its standard error. 300 blocks resolve 0.2 % or so. Samples are small and
nothing is done with them, so what watching takes is as large a share as it can be. Looks come as
rarely as they do after the first seconds of a run. Not included are the two readings of the clock
for each batch, which take a tenth of a microsecond.
"""

from __future__ import annotations

import argparse
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
WARM_UP_SECONDS = 2.0
TRIMMED = 0.2
"""Of the blocks, this share is left out at either end: something else has disturbed them."""
WORKERS = {"inline": 0, "thread": 2, "process": 1}


class Chunks:
    """The chunks of a process: how many batches each had, and the CPU seconds they took."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        self._lock = threading.Lock()
        self._looks = threading.Event()
        self._batches = 0
        self._began = self._warm_at = 0.0

    def count(self) -> list[tuple[int, float]]:
        """Count a batch; return the chunks that are complete."""
        with self._lock:
            now = time.process_time()
            self._warm_at = self._warm_at or now + WARM_UP_SECONDS
            if now < self._warm_at:
                return []
            self._batches += 1
            if not self._began or now - self._began >= CHUNK_SECONDS:
                if self._began:
                    self.found.append((self._batches, now - self._began))
                self._watch(is_watched(len(self.found)))
                self._began, self._batches = time.process_time(), 0
            return list(self.found)

    def _watch(self, watched: bool) -> None:
        """Let the profiler of this process look and hosts measure batches, or neither."""
        looker: Any = profiler()
        looker._eager_until = 0.0
        for host in list(looker._hosts):
            host._clock._calls, host._clock.is_due = 0.0, False
        if watched:
            vars(looker).pop("look_if_due", None)
            self._looks.set()
        else:
            self._looks.clear()
            vars(looker)["look_if_due"] = self._pause if looker._thread else lambda: PERIOD_SECONDS

    def _pause(self) -> float:
        """Keep the thread of the profiler from waking up."""
        self._looks.wait()
        return 0.0


_chunks: Chunks | None = None
"""Those of this process, which may be a worker."""


def chunks() -> Chunks:
    """Return the chunks of this process."""
    global _chunks
    _chunks = _chunks or Chunks()
    return _chunks


def is_watched(chunk: int) -> bool:
    """Return whether the loader is watched in a chunk: off, on, on, off, and then vice versa."""
    return (chunk % 4 in (1, 2)) != (chunk // 4 % 2 == 1)


class Raw(DefaultTaskEncoder):
    """Yields how many CPU seconds chunks of samples took that are left as they are."""

    decoder = None

    def encode_sample(self, sample: object) -> object:
        return sample

    def batch(self, samples: list[object]) -> list[tuple[int, float]]:
        return chunks().count()


def trimmed_mean(numbers: list[float]) -> tuple[float, float]:
    """Return the mean without what is left out at either end, and its standard error."""
    inner = sorted(numbers)[(cut := int(TRIMMED * len(numbers))) : len(numbers) - cut]
    # Of a trimmed mean: from the spread of all numbers, with those at the ends pulled in.
    pulled = [min(max(number, inner[0]), inner[-1]) for number in numbers]
    return mean(inner), stdev(pulled) / ((1 - 2 * TRIMMED) * math.sqrt(len(numbers)))


def measure(folder: str, kind: str, blocks: int) -> None:
    """Print what watching costs one kind of workers."""
    global _chunks
    _chunks = None
    config = WorkerConfig(rank=0, world_size=1, num_workers=WORKERS[kind], lanes=2)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=BATCH_SIZE, task_encoder=Raw()
    )
    found: list[tuple[int, float]] = []
    with get_loader(dataset, workers="thread" if kind == "thread" else "process") as loader:
        monitor: Any = loader._monitor
        due = monitor.next_look
        for found in loader:
            due = due if monitor.next_look == math.inf else monitor.next_look
            monitor.next_look = due if is_watched(len(found)) else math.inf
            if len(found) >= 4 * blocks:
                break
    chunks()._watch(True)
    ratios, alone = [], []
    for block in range(blocks):
        taken = {False: 0.0, True: 0.0}
        for chunk in range(4 * block, 4 * block + 4):
            batches, seconds = found[chunk]
            taken[is_watched(chunk)] += seconds / (batches * BATCH_SIZE) / 2
        ratios.append(taken[True] / taken[False])
        alone.append(taken[False])
    ratio, error = trimmed_mean(ratios)
    sys.stdout.write(
        f"{kind}: {1e6 * median(alone):.3f} us of CPU a sample, "
        f"watched {100 * (ratio - 1):+.2f} % +- {100 * error:.2f} %\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--kind", nargs="+", choices=WORKERS, default=list(WORKERS))
    arguments = parser.parse_args()
    logging.getLogger("energon").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        data.write(Path(folder), "text", num_samples=20_000, num_shards=4)
        prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
        for kind in arguments.kind:
            measure(folder, kind, arguments.blocks)


if __name__ == "__main__":
    main()
