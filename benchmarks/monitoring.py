"""Measure the cost of the figures of a loader: marks of its progress, and measured batches.

    python benchmarks/monitoring.py [--blocks N] [--kind inline thread process] [--page]

The same raw samples are read in the training process, by two threads, or by a worker process, in
chunks during which the loader is watched or not; times are CPU seconds of the process that reads.
Samples are small and nothing is done with them, so what watching takes is as large a share as it
can be. Others may use the machine: four chunks of a tenth of a second make a block (off, on, on,
off, or the other way round), in which slow drifts cancel; measured batches and marks of the
progress come ten times as often as in a run, and a tenth of their cost is given. It is the mean of
all blocks but the outer fifths, with two standard errors.

What is done for every batch cannot be turned off: reading the clock, and adding up what has passed.
How often that is done is counted, and multiplied by how long it takes.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import platform
import sys
import tempfile
import threading
import time
import timeit
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import mean, median, stdev
from types import FrameType
from typing import Any

import data
from energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset
from energon.loader.monitoring import accounts, monitor
from energon.prepare.dataset import prepare_dataset

PAGE = Path(__file__).resolve().parents[1] / "docs/benchmarks_parts.md"
BEGINS = "Measured by `benchmarks/monitoring.py`"
BATCH_SIZE = 32
CHUNK_SECONDS = 0.1
WARM_UP_SECONDS = 2.0
TIMES = 10
"""How many times as often as usual everything happens in chunks during which it does."""
TRIMMED = 0.2
"""Of the blocks, this share is left out at either end: something else has disturbed them."""
COUNTED = 50
"""Batches for which readings of the clock are counted, after as many others."""
SHARE = accounts.SHARE
WORKERS = {"inline": 0, "thread": 2, "process": 1}
TITLES = {"inline": "none (`num_workers=0`)", "thread": "2 threads", "process": "1 process"}


class Chunks:
    """The chunks of a process: how many batches each had, and the CPU seconds they took."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        self._lock = threading.Lock()
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
                self.watch(is_watched(len(self.found)))
                self._began, self._batches = time.process_time(), 0
            return list(self.found)

    def watch(self, watched: bool) -> None:
        """Let hosts of this process measure batches, or not."""
        accounts.SHARE = TIMES * SHARE if watched else 1e-12  # type: ignore[misc]
        for clock in [each for each in gc.get_objects() if type(each) is accounts.BatchClock]:
            clock.due_at = 0.0 if watched else math.inf


_chunks: Chunks | None = None
"""Those of this process, which may be a worker."""


def chunks() -> Chunks:
    """Return the chunks of this process."""
    global _chunks
    if _chunks is None:
        _chunks = Chunks()
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


class Reads:
    """How often a thread reads the clock while it makes or takes some batches."""

    def __init__(self) -> None:
        self.found = self._batches = 0

    def count(self) -> int:
        """Count a batch; return the readings of the chosen ones, once these are done."""
        self._batches += 1
        if self._batches == COUNTED:
            sys.setprofile(self._note)
        elif self._batches == 2 * COUNTED:
            sys.setprofile(None)
        return self.found

    def _note(self, _: FrameType, event: str, function: Any) -> None:
        self.found += event == "c_call" and function is time.perf_counter


class Reading(Raw):
    """Yields how often the clock was read to make batches."""

    reads: Reads | None = None

    def batch(self, samples: list[object]) -> int:  # type: ignore[override]
        if self.reads is None:
            chunks().watch(False)
            self.reads = Reads()
        return self.reads.count()


def batches_of(folder: str, kind: str, encoder: DefaultTaskEncoder, workers: int) -> Any:
    """Return a loader for one kind of workers."""
    global _chunks
    _chunks = None
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, lanes=2)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=BATCH_SIZE, task_encoder=encoder
    )
    return get_loader(dataset, workers="thread" if kind == "thread" else "process")


def read_seconds(folder: str, kind: str) -> float:
    """Return how long it takes to read the clock as often as is done for a batch."""
    taken, made = Reads(), 0
    with batches_of(folder, kind, Reading(), min(1, WORKERS[kind])) as loader:
        loader._monitor.next_look = math.inf
        for batch in islice(loader, 3 * COUNTED):
            made = batch
            if kind != "inline":
                taken.count()
    step = "timer.seconds += perf_counter() - 1.0"
    setup = "from time import perf_counter\nclass timer: seconds = 0.0"
    each = min(timeit.repeat(step, setup, number=10_000, repeat=50)) / 10_000
    return each * (made + taken.found) / COUNTED


def trimmed_mean(numbers: list[float]) -> tuple[float, float]:
    """Return the mean without what is left out at either end, and its standard error."""
    inner = sorted(numbers)[(cut := int(TRIMMED * len(numbers))) : len(numbers) - cut]
    # Of a trimmed mean: from the spread of all numbers, with those at the ends pulled in.
    pulled = [min(max(number, inner[0]), inner[-1]) for number in numbers]
    return mean(inner), stdev(pulled) / ((1 - 2 * TRIMMED) * math.sqrt(len(numbers)))


def measure(folder: str, kind: str, blocks: int) -> str:
    """Return a line of the table: what watching costs one kind of workers."""
    found: list[tuple[int, float]] = []
    with batches_of(folder, kind, Raw(), WORKERS[kind]) as loader:
        monitor = loader._monitor
        due = monitor.next_look
        for found in loader:
            due = due if monitor.next_look == math.inf else monitor.next_look
            monitor.next_look = due if is_watched(len(found)) else math.inf
            if len(found) >= 4 * blocks:
                break
    chunks().watch(True)
    costs, alone = [], []
    for block in range(blocks):
        taken = {False: 0.0, True: 0.0}
        for chunk in range(4 * block, 4 * block + 4):
            batches, seconds = found[chunk]
            taken[is_watched(chunk)] += seconds / batches / 2
        costs.append((taken[True] - taken[False]) / taken[False] / TIMES)
        alone.append(taken[False])
    cost, error = trimmed_mean(costs)
    always = read_seconds(folder, kind) / median(alone)
    most = cost + always + 2 * error
    return (
        f"| {TITLES[kind]} | {1e6 * median(alone) / BATCH_SIZE:.1f} µs | {cost:.2%} ± "
        f"{2 * error:.2%} | {always:.2%} | {most:.2%} |"
    )


def section(lines: list[str], blocks: int) -> str:
    """Return the lines of the page that repeat what was measured."""
    return "\n".join(
        [
            f"{BEGINS} on {date.today()} with {os.cpu_count()} cores ({platform.machine()}), "
            f"Python {platform.python_version()}: CPU time of raw text samples in batches of "
            f"{BATCH_SIZE}, without hooks, so that watching takes the largest possible share. "
            f"Means of {blocks} blocks, with two standard errors.",
            "",
            "| workers | a sample takes | measured batches | clock readings | at most |",
            "|---|---:|---:|---:|---:|",
            *lines,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--kind", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--page", action="store_true", help=f"write the table to {PAGE.name}")
    arguments = parser.parse_args()
    logging.getLogger("energon").setLevel(logging.ERROR)
    monitor.MARK_SECONDS /= TIMES  # type: ignore[misc]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        data.write(Path(folder), "text", num_samples=20_000, num_shards=4)
        prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
        for kind in arguments.kind:
            lines.append(measure(folder, kind, arguments.blocks))
            sys.stdout.write(f"{lines[-1]}\n")
            sys.stdout.flush()
    if arguments.page:
        text = PAGE.read_text()
        start = text.index(BEGINS)
        stop = text.index("\n\n", text.index("\n|", start)) + 1
        PAGE.write_text(text[:start] + section(lines, arguments.blocks) + text[stop:])


if __name__ == "__main__":
    main()
