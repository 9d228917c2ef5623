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
    folders["restore"] = folders["jpg"]
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
    restores = [{"kind": "restore", "way": way} for way in ("process", "ray")]
    return [{"kind": kind, "way": way} for kind in KINDS for way in WAYS] + restores


def tables(results: Results) -> str:
    """Return the table of the page."""
    lines = [
        "| way of the batch | JPEGs, images/s | arrays, images/s | trainer blocked, per batch "
        "| CPU of the trainer, per batch | first batch after a restore | after 5 s of setup |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    processes = rounds_of(results, kind="jpg", way="process")
    for way, title in WAYS.items():
        jpegs, arrays = (rounds_of(results, kind=kind, way=way) for kind in KINDS)
        speed = ratio(jpegs, processes, "images_per_second")
        restored = ["", ""]
        if way != "ray_data":
            restores = rounds_of(results, kind="restore", way=way)
            names = ("restore_seconds", "restore_wait_seconds")
            restored = [shown(restores, name, 1, unit=" s") for name in names]
        lines.append(
            f"| {title} | {shown(jpegs, 'images_per_second')}, {speed:.2f} x | "
            f"{shown(arrays, 'images_per_second')} | {shown(arrays, 'blocked_ms', 1, unit=' ms')} "
            f"| {shown(arrays, 'trainer_cpu_ms', 1, unit=' ms')} | {' | '.join(restored)} |"
        )
    actors = rounds_of(results, kind="restore", way="ray")
    return "\n".join(
        [
            *lines,
            "",
            "Actors are new processes, which start when the loader is built; importing torch alone "
            f"takes a process {shown(actors, 'import_seconds', 1, unit=' s')}. A program that sets "
            "up its model for 5 s between building the loader and the first batch waits for the "
            "rest only, as the last column shows.",
        ]
    )


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
