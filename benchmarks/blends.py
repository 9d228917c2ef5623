"""Measure metadatasets of many datasets, and joins, for docs/benchmarks_parts.md.

    benchmarks/peers.sh
    python benchmarks/blends.py [--rounds 5] [--only WORD] [--data FOLDER] [--peers PYTHON]

Both libraries run the same program on the same files, prepared by this one, each time in a fresh
process. Five rounds take about two minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from data import tar_member
from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    inherited,
    rounds_of,
    shown,
    versions_of,
)

DATASETS, SHARDS, SAMPLES = 300, 4, 50
JOINED = 500_000
TYPES = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
NAMES = ("energon (this)", "Megatron-Energon")


def main() -> None:
    """Measure, and write the page."""
    arguments = BENCHMARK.parsed(BENCHMARK.parser(__doc__, data="blends"))
    blend, join = make_blend(arguments.data), make_join(arguments.data)
    pythons = dict(zip(NAMES, (sys.executable, arguments.peers), strict=True))

    def measure(case: Case) -> dict[str, Any]:
        python = pythons[case["library"]]
        return start(python, blend) if case["task"] == "blend" else build(python, join)

    versions = versions_of(sys.executable, energon="energon-loader")
    versions |= versions_of(arguments.peers, **{"Megatron-Energon": "megatron-energon"})
    cases = [{"task": task, "library": name} for task, name in product(("blend", "join"), NAMES)]
    BENCHMARK.run(arguments, cases, measure, versions)


def make_blend(folder: Path) -> Path:
    """Return a metadataset of many small datasets, made on first use."""
    path = folder / "many/blend.yaml"
    if not path.exists():
        for number in range(DATASETS):
            keys = np.arange(SHARDS * SAMPLES)
            write(folder / f"many/{number}", np.split(keys, SHARDS), f"d{number}_")
        entries = "".join(
            f"      - {{path: ./{n}, weight: {n % 7 + 1}}}\n" for n in range(DATASETS)
        )
        path.write_text(f"{TYPES}splits:\n  train:\n    blend:\n{entries}")
    return path


def make_join(folder: Path) -> Path:
    """Return a metadataset of two datasets with the same keys, in another order and sharding."""
    path = folder / "join/join.yaml"
    if not path.exists():
        keys = np.arange(JOINED)
        write(folder / "join/left", np.split(keys, 50), "sample_")
        mixed = np.random.default_rng(0).permutation(keys)
        write(folder / "join/right", np.split(mixed, 32), "sample_")
        path.write_text(
            f"{TYPES}splits:\n  train:\n    join: [{{path: ./left}}, {{path: ./right}}]\n"
            "    joiner: {__module__: megatron.energon, __class__: TextSample}\n"
        )
    return path


def write(folder: Path, shards: Sequence[np.ndarray[Any, Any]], prefix: str) -> None:
    """Write and prepare a crude dataset of short texts."""
    folder.mkdir(parents=True)
    for number, keys in enumerate(shards):
        members = (tar_member(f"{prefix}{key:09}.txt", b"text %d" % key) for key in keys)
        (folder / f"{number:03}.tar").write_bytes(b"".join(members) + bytes(1024))
    command = [sys.executable, "-m", "energon.cli.main", "prepare", str(folder)]
    command += ["--non-interactive", "--split-parts", "train:.*", "--num-workers", "2"]
    subprocess.run([*command, "--sample-type", "CrudeWebdataset"], check=True, capture_output=True)


def start(python: str, path: Path) -> dict[str, Any]:
    """Return what opening a metadataset takes."""
    command = [python, str(ROOT / "benchmarks/blend_start.py"), str(path)]
    return in_fresh_process(command, peer=python != sys.executable)


def build(python: str, path: Path) -> dict[str, Any]:
    """Return what building the index of a join takes, the start of the program included."""
    shutil.rmtree(f"{path}.cache", ignore_errors=True)
    begin = time.perf_counter()
    with subprocess.Popen(
        [str(Path(python).parent / "energon"), "prepare", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=inherited(peer=python != sys.executable),
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{python}: preparing {path} ended with {process.returncode}")
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_mb": usage.ru_maxrss / 1024,
    }


def tables(results: Results) -> str:
    """Return both tables."""
    lines = [
        f"### A blend of {DATASETS} datasets",
        "",
        "Time from the call of `get_train_dataset` to the first batch of 32, without workers. "
        f"Each dataset has {SHARDS} shards. Descriptors and memory are those after 300 batches.",
        "",
        "| | first batch, s | CPU for it, s | open descriptors | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    for name in NAMES:
        found = rounds_of(results, task="blend", library=name)
        cells = [shown(found, "seconds", 2), shown(found, "cpu_seconds", 2)]
        cells += [shown(found, "descriptors"), shown(found, "memory_mb")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"### The index of a join of two datasets of {JOINED:,} samples",
        "",
        "The command `energon prepare join.yaml`, for 50 and 32 shards with the same keys in "
        "different orders.",
        "",
        "| | seconds | CPU, s | peak memory, MB |",
        "|---|---|---|---|",
    ]
    for name in NAMES:
        found = rounds_of(results, task="join", library=name)
        cells = [shown(found, "seconds", 1), shown(found, "cpu_seconds", 1)]
        lines.append(f"| {name} | {' | '.join(cells)} | {shown(found, 'memory_mb')} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
