"""Measure streaming over plain tar files beside webdataset, and write docs/benchmarks_stream.md.

    benchmarks/peers.sh
    python benchmarks/stream.py [--data FOLDER] [--scale 0.1] [--rounds 5] [--peers PYTHON]

Every figure comes from a fresh process. Both libraries run the same program, and take turns
within a round, so that they see the same machine; the table shows medians over the rounds. Raw
samples are shuffled through a buffer of 1000 and batched by 32. A round takes about two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import date
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks_stream.md"
MARK = "<!-- made by benchmarks/stream.py -->"
LIBRARIES = {"energon.webdataset": "energon-loader", "webdataset": "webdataset"}
KINDS = ("text", "interleaved", "image")
TASKS = ("raw", "pipe", "decode")
TITLES = {"raw": "raw", "pipe": "raw, through `pipe:cat`", "decode": "decoded"}
BATCH = 32
WARM_SECONDS = 1.5
Case = tuple[str, str, int]


def main() -> None:
    """Measure all cases, or one if it is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
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
        if task == "raw" or (task, kind) in (("decode", "image"), ("pipe", "text"))
    ]
    found: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for case, library in product(cases, LIBRARIES):
            result = run(pythons[library], library, case, arguments)
            found.setdefault((case, library), []).append(result)
    text = page(cases, found, arguments.rounds)
    arguments.page.write_text(text)
    print(text)


def make_data(folder: Path, scale: float) -> None:
    """Write the datasets that are not there."""
    from data import SAMPLES, SHARDS, write

    for kind in KINDS:
        number = max(100, int(SAMPLES[kind] * scale))
        write(folder / kind, kind, num_samples=number, num_shards=SHARDS[kind])


def run(python: str, library: str, case: Case, arguments: Any) -> dict[str, Any]:
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
        result: dict[str, Any] = json.loads(output.read().splitlines()[-1])
    return result


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
    result = {"samples_per_second": count / elapsed, "first_seconds": first}
    print(json.dumps({**result, "version": version(LIBRARIES[library])}))
    sys.stdout.flush()
    # Loaders of some libraries do not end on their own.
    os._exit(0)


def same(batch: Any) -> Any:
    """Return the batch as it is."""
    return batch


def smaller(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the image cropped to 224 by 224, as training would have it."""
    return {**sample, "jpg": sample["jpg"][:224, :224].copy()}


def page(
    cases: list[Case], found: dict[tuple[Case, str], list[dict[str, Any]]], rounds: int
) -> str:
    """Return the page of the documentation."""
    versions = {library: found[cases[0], library][0]["version"] for library in LIBRARIES}
    return (
        "# Benchmarks: streaming over plain tar files\n\n"
        "`benchmarks/peers.sh && .venv/bin/python benchmarks/stream.py` measures and writes the "
        "table below; a round takes two minutes.\n\n"
        f"Both libraries run the same program over the same shards, without an index: "
        "`WebDataset(shards, shardshuffle=100).shuffle(1000).batched(32)`, with workers in a "
        "`WebLoader`. A text sample has two parts and 300 bytes, an interleaved one twelve parts, "
        "an image a JPEG of 70 kB with a caption and metadata. Decoded images are arrays, cropped "
        "to 224 by 224 pixels.\n\n"
        f"{MARK}\n\n"
        f"Measured on {date.today()} with {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}: energon {versions['energon.webdataset']} and webdataset "
        f"{versions['webdataset']}. Medians of {rounds} rounds, each in a fresh process; "
        "data in the page cache.\n\n"
        f"{table(cases, found)}\n"
    )


def table(cases: list[Case], found: dict[tuple[Case, str], list[dict[str, Any]]]) -> str:
    """Return the medians as Markdown."""
    lines = [
        "| samples/s | workers | energon | webdataset | ratio | first batch, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in cases:
        speeds, firsts = (
            [median(each[name] for each in found[case, library]) for library in LIBRARIES]
            for name in ("samples_per_second", "first_seconds")
        )
        kind, task, workers = case
        lines.append(
            f"| {kind}, {TITLES[task]} | {workers} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | "
            f"**{speeds[0] / speeds[1]:.1f} x** | {firsts[0]:.2f} / {firsts[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
