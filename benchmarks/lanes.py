"""Measure the lanes of a new run against one for each worker, and write docs/benchmarks_lanes.md.

    python benchmarks/lanes.py [--rounds 3] [--scale 0.1] [--data FOLDER]

Both numbers run the same programs on the same data, take turns within a round, and have a fresh
process for every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median

from data import SAMPLES, SHARDS, write
from run import prepare

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks_lanes.md"
KINDS = ("text", "interleaved", "image")
PROGRAMS = {"plain": "no hook", "cooker": "cooker that passes samples on"}
WORKERS = (0, 2)
RUNS = ("for each worker", "default")
FIGURES = {"cpu_seconds_per_1000": (1000, 1), "pss_mb": (1, 0)}
"""By what a figure is multiplied, and its digits."""
Case = tuple[str, str, int]
Figures = dict[str, list[dict[str, float]]]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a window of measuring")
    parser.add_argument("--windows", type=int, default=5, help="in each process")
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made" / "lanes")
    arguments = parser.parse_args()
    for kind in KINDS:
        count = int(SAMPLES[kind] * arguments.scale)
        write(arguments.data / kind, kind, num_samples=count, num_shards=SHARDS[kind])
        prepare(arguments.data / kind, "--sample-type", "CrudeWebdataset")
    found: dict[Case, Figures] = {}
    for number, case in product(range(arguments.rounds), product(KINDS, PROGRAMS, WORKERS)):
        # Whoever comes second may find caches warm, or the machine hot.
        for run in RUNS if number % 2 else RUNS[::-1]:
            figures = measure(arguments, case, run)
            found.setdefault(case, {name: [] for name in RUNS})[run].append(figures)
            print(number, *case, run, figures, flush=True)
    PAGE.write_text(page(found, arguments.rounds))


def measure(arguments: argparse.Namespace, case: Case, run: str) -> dict[str, float]:
    """Return the figures of a case, from a fresh process."""
    kind, program, workers = case
    environment = dict(os.environ)
    if run != "default":
        environment["BENCHMARKED_LANES"] = str(max(1, workers))
    command = [sys.executable, str(ROOT / "benchmarks/measure.py"), "ours"]
    command += [str(arguments.data / kind), "--workers", str(workers), "--program", program]
    command += ["--seconds", str(arguments.seconds), "--windows", str(arguments.windows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result = json.loads(done.stdout.splitlines()[-1])
    return {name: result[name] for name in FIGURES}


def page(found: dict[Case, Figures], rounds: int) -> str:
    """Return the page."""
    lines = [
        "# Benchmarks of lanes",
        "",
        f"Made by `benchmarks/lanes.py` on {date.today()} with {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}: the minimum of {rounds} "
        "rounds, which other work on the machine affects least; data in the page cache. See "
        "[all benchmarks](benchmarks.md).",
        "",
        "A new run has 24 [lanes](save_and_resume.md#lanes) or a multiple of that, so that it can "
        "be resumed on many numbers of ranks. This table shows what the lanes cost. Each cell "
        "has the figure with one lane per worker, `WorkerConfig(lanes=max(1, num_workers))`, and "
        "the figure with the default. Batches of 32, shuffled.",
        "",
        "| data | program | workers | CPU ms for 1,000 samples | memory, MB |",
        "|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {name: [] for name in FIGURES}
    spreads = []
    for (kind, program, workers), runs in found.items():
        cells = []
        for name, (scale, digits) in FIGURES.items():
            before, after = (scale * min(each[name] for each in runs[run]) for run in RUNS)
            cells.append(f"{before:,.{digits}f} / {after:,.{digits}f} ({after / before:.2f} x)")
            ratios[name].append(after / before)
        spreads += [spread(figures) for figures in runs.values()]
        lines.append(f"| {kind} | {PROGRAMS[program]} | {workers} | {' | '.join(cells)} |")
    cpu, memory = map(median, ratios.values())
    lines += [
        "",
        f"In the median, the default takes {cpu:.2f} times the CPU time and {memory:.2f} times the "
        f"memory. The CPU time of a run varies by {median(spreads):.0%} between rounds; ratios "
        "within that range are not significant.",
    ]
    return "\n".join(lines) + "\n"


def spread(figures: list[dict[str, float]]) -> float:
    """Return by how much CPU time differs between rounds, as a share of the least."""
    cpu = [each["cpu_seconds_per_1000"] for each in figures]
    return (max(cpu) - min(cpu)) / min(cpu)


if __name__ == "__main__":
    main()
