"""Measure streaming over plain tar files beside webdataset, for docs/benchmarks.md.

    benchmarks/peers.sh
    python benchmarks/stream.py [--rounds 5] [--only WORD] [--scale 0.1] [--peers PYTHON]

Every figure comes from a fresh process. Both libraries run the same program over the same shards,
without an index: raw samples are shuffled through a buffer of 1000 and batched by 32. Five rounds
take about five minutes.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
import warnings
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from results import (
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    ratio,
    rounds_of,
    shown,
    versions_of,
)

LIBRARIES = ("energon.webdataset", "webdataset")
KINDS = ("text", "interleaved", "image")
TASKS = ("raw", "pipe", "decode")
TITLES = {"raw": "raw", "pipe": "raw, through `pipe:cat`", "decode": "decoded"}
BATCH = 32
WARM_SECONDS = 0.75
ROWS = [
    (kind, task, workers)
    for kind, task, workers in product(KINDS, TASKS, (0, 2))
    if task == "raw" or (task, kind) in (("decode", "image"), ("pipe", "text"))
]


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=1.0, help="that each is measured for")
    parser.add_argument("--one", nargs=4, metavar=("LIBRARY", "KIND", "TASK", "WORKERS"))
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        library, kind, task, workers = arguments.one
        measure(library, arguments.data / kind, task, int(workers), arguments.seconds)
        return
    make_data(arguments.data, arguments.scale)
    pythons = dict(zip(LIBRARIES, (sys.executable, arguments.peers), strict=True))
    options = ["--data", str(arguments.data), "--seconds", str(arguments.seconds), "--one"]

    def fresh(case: Case) -> dict[str, Any]:
        python = pythons[case["library"]]
        names = [str(case[name]) for name in ("library", "data", "task", "workers")]
        return in_fresh_process([python, __file__, *options, *names], peer=python != sys.executable)

    cases = [
        {"data": kind, "task": task, "workers": workers, "library": library}
        for (kind, task, workers), library in product(ROWS, LIBRARIES)
    ]
    versions = versions_of(sys.executable, energon="energon-loader")
    versions |= versions_of(arguments.peers, webdataset="webdataset")
    BENCHMARK.run(
        arguments, cases, fresh, versions, scale=arguments.scale, seconds=arguments.seconds
    )


def make_data(folder: Path, scale: float) -> None:
    """Write the datasets that are not there."""
    from data import SAMPLES, SHARDS, write

    for kind in KINDS:
        number = max(100, int(SAMPLES[kind] * scale))
        write(folder / kind, kind, num_samples=number, num_shards=SHARDS[kind])


def measure(library: str, folder: Path, task: str, workers: int, seconds: float) -> None:
    """Print the speed of one library as a JSON line."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    wds = import_module(library)
    shards = sorted(glob.glob(f"{folder}/*.tar"))
    if task == "pipe":
        os.environ["ENERGON_ALLOW"] = "shell"
        shards = [f"pipe:cat {shard}" for shard in shards]
    dataset = wds.WebDataset(shards, shardshuffle=100).shuffle(1000)
    if task == "decode":
        dataset = dataset.decode("rgb8").map(smaller)
    dataset = dataset.batched(BATCH, collation_fn=same).repeat()
    if workers:
        dataset = wds.WebLoader(dataset, batch_size=None, num_workers=workers, collate_fn=same)
    batches = iter(dataset)
    next(batches)
    first = time.perf_counter() - start
    warm_until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm_until:
        next(batches)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        count += len(next(batches))
    print(json.dumps({"samples_per_second": count / elapsed, "first_seconds": first}))
    sys.stdout.flush()
    # Loaders of some libraries do not end on their own.
    os._exit(0)


def same(batch: Any) -> Any:
    """Return the batch as it is."""
    return batch


def smaller(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the image cropped to 224 by 224, as training would have it."""
    return {**sample, "jpg": sample["jpg"][:224, :224].copy()}


def tables(results: Results) -> str:
    """Return the medians as Markdown."""
    lines = [
        "| samples/s | workers | energon | webdataset | ratio | first batch, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, task, workers in ROWS:
        both = [
            rounds_of(results, data=kind, task=task, workers=workers, library=library)
            for library in LIBRARIES
        ]
        speeds = " | ".join(shown(rounds, "samples_per_second") for rounds in both)
        firsts = " / ".join(f"{middle(rounds, 'first_seconds'):.2f}" for rounds in both)
        times = ratio(*both, "samples_per_second")
        lines.append(
            f"| {kind}, {TITLES[task]} | {workers} | {speeds} | **{times:.1f} x** | {firsts} |"
        )
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, page="benchmarks.md")

if __name__ == "__main__":
    main()
