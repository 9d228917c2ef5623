"""Measure streaming over plain tar files beside webdataset, and print a table.

    python benchmarks/stream.py [--data FOLDER] [--scale 0.1] [--rounds 3] [--peers PYTHON]

Every figure comes from a fresh process. Both libraries run the same program, and take turns
within a round, so that they see the same machine; the table shows medians over the rounds. Raw
samples are shuffled through a buffer of 1000 and batched by 32.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"energon.webdataset": "energon (this)", "webdataset": "webdataset"}
KINDS = ("text", "image", "interleaved")
TASKS = ("raw", "decode")
BATCH = 32
WARM_SECONDS = 1.5
Case = tuple[str, str, int]


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--one", nargs=4, metavar=("LIBRARY", "KIND", "TASK", "WORKERS"))
    arguments = parser.parse_args()
    if arguments.one:
        library, kind, task, workers = arguments.one
        measure(library, arguments.data / kind, task, int(workers), arguments.seconds)
        return
    make_data(arguments.data, arguments.scale)
    pythons = {"energon.webdataset": sys.executable, "webdataset": arguments.peers}
    cases: list[Case] = [
        (kind, task, workers)
        for kind, task, workers in product(KINDS, TASKS, (0, 2))
        if task == "raw" or kind == "image"
    ]
    found: dict[tuple[Case, str], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for case, library in product(cases, LIBRARIES):
            result = run(pythons[library], library, case, arguments)
            found.setdefault((case, library), []).append(result)
    print(table(cases, found))


def make_data(folder: Path, scale: float) -> None:
    """Write the datasets that are not there."""
    from data import SAMPLES, SHARDS, write

    for kind in KINDS:
        number = max(100, int(SAMPLES[kind] * scale))
        write(folder / kind, kind, num_samples=number, num_shards=SHARDS[kind])


def run(python: str, library: str, case: Case, arguments: Any) -> dict[str, float]:
    """Measure one case in a process of its own."""
    kind, task, workers = case
    command = [python, __file__, "--data", str(arguments.data), "--seconds"]
    command += [str(arguments.seconds), "--one", library, kind, task, str(workers)]
    with tempfile.TemporaryFile("w+") as output:
        # Workers that outlive their parent must not keep us waiting, nor busy.
        process = subprocess.Popen(command, stdout=output, start_new_session=True)
        try:
            status = process.wait(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}")
        output.seek(0)
        result: dict[str, float] = json.loads(output.read().splitlines()[-1])
    return result


def measure(library: str, folder: Path, task: str, workers: int, seconds: float) -> None:
    """Print the speed of one library as a JSON line."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    wds = import_module(library)
    shards = sorted(glob.glob(f"{folder}/*.tar"))
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
    # Loaders of some libraries do not end by themselves.
    os._exit(0)


def same(batch: Any) -> Any:
    """Return the batch as it is."""
    return batch


def smaller(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the picture cut to 224 × 224, as training would have it."""
    return {**sample, "jpg": sample["jpg"][:224, :224].copy()}


def table(cases: list[Case], found: dict[tuple[Case, str], list[dict[str, float]]]) -> str:
    """Return the medians as Markdown."""
    lines = [
        "| samples/s | workers | energon | webdataset | ratio | first batch, s |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        speeds, firsts = (
            [median(each[name] for each in found[case, library]) for library in LIBRARIES]
            for name in ("samples_per_second", "first_seconds")
        )
        kind, task, workers = case
        lines.append(
            f"| {kind}, {task} | {workers} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | "
            f"**{speeds[0] / speeds[1]:.1f}** | {firsts[0]:.2f} / {firsts[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
