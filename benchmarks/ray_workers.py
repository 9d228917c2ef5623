"""Measure workers on Ray against processes and Ray Data, and write docs/benchmarks_parts.md.

    python benchmarks/ray_workers.py [--rounds 3] [--only WORD] [--data FOLDER]

One program for all: two workers make batches of 128 images of 224 x 224, of 19 MB, and each process
has a Ray cluster of its own. Workers decode JPEGs of about 70 kB, or load arrays.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pinned
from data import write
from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    ratio,
    rounds_of,
    shown,
    versions_of,
)
from run import prepare

SAMPLES, SHARDS = 3_000, 15
WAYS = {
    "process": "worker processes",
    "ray": "Ray actors (`RayWorkers`)",
    "ray_data": "Ray Data, `iter_torch_batches`",
}
KINDS = {"jpg": "JPEGs", "npy": "arrays"}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "benchmarks"),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default, workers of Ray have a low priority, which worker processes do not have.
    "RAY_worker_niceness": "0",
}
PROGRAM = Path(__file__).parent / "adapters" / "on_ray.py"


def main() -> None:
    """Measure, and write the results and the page."""
    arguments = BENCHMARK.parsed(BENCHMARK.parser(__doc__, data="ray_workers"))
    folders = {"jpg": arguments.data / "image", "npy": arguments.data / "arrays"}
    write(folders["jpg"], "image", num_samples=SAMPLES, num_shards=SHARDS)
    prepare(folders["jpg"], "--sample-type", "CrudeWebdataset")
    if not folders["npy"].exists():
        pinned.write(folders["npy"])

    def measure(case: Case) -> dict[str, Any]:
        command = [sys.executable, str(PROGRAM), case["way"], case["kind"]]
        command.append(str(folders[case["kind"]]))
        return in_fresh_process(command, **ENVIRONMENT)

    versions = versions_of(sys.executable, energon="energon-loader", ray="ray", torch="torch")
    BENCHMARK.run(arguments, cases(), measure, versions)


def cases() -> list[Case]:
    """Return the cases."""
    return [{"kind": kind, "way": way} for kind in KINDS for way in WAYS]


def tables(results: Results) -> str:
    """Return the table of the page."""
    lines = [
        "| way of the batch | JPEGs, images/s | arrays, images/s | trainer blocked, per batch "
        "| CPU of the trainer, per batch | first batch after a restore |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    processes = rounds_of(results, kind="jpg", way="process")
    for way, title in WAYS.items():
        jpegs, arrays = (rounds_of(results, kind=kind, way=way) for kind in KINDS)
        speed = ratio(jpegs, processes, "images_per_second")
        restore = "" if way == "ray_data" else shown(jpegs, "restore_seconds", 1, unit=" s")
        lines.append(
            f"| {title} | {shown(jpegs, 'images_per_second')}, {speed:.2f} x | "
            f"{shown(arrays, 'images_per_second')} | {shown(arrays, 'blocked_ms', 1, unit=' ms')} "
            f"| {shown(arrays, 'trainer_cpu_ms', 1, unit=' ms')} | {restore} |"
        )
    actors = rounds_of(results, kind="jpg", way="ray")
    return "\n".join(
        [
            *lines,
            "",
            "Until the first batch after a restore, actors start as new processes; importing torch "
            f"alone takes a process {shown(actors, 'import_seconds', 1, unit=' s')} of that.",
        ]
    )


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
