"""Measure metadatasets of many datasets, and joins, and write docs/benchmarks_blends.md.

    python benchmarks/blends.py [--rounds 3] [--data FOLDER] [--peers PYTHON]

Both libraries run the same program on the same files, prepared by this one, each time in a fresh
process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from data import tar_member

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks_blends.md"
DATASETS, SHARDS, SAMPLES = 300, 4, 50
JOINED = 500_000
TYPES = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
NAMES = ("energon (this)", "Megatron-Energon")


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made" / "blends")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    arguments = parser.parse_args()
    blend, join = make_blend(arguments.data), make_join(arguments.data)
    pythons = dict(zip(NAMES, (sys.executable, arguments.peers), strict=True))
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    builds: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for _ in range(arguments.rounds):
        for name, python in pythons.items():
            starts[name].append(start(python, blend))
            builds[name].append(build(python, join))
            print(name, starts[name][-1], builds[name][-1], flush=True)
    PAGE.write_text(page(starts, builds, arguments.rounds))


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


def start(python: str, path: Path) -> dict[str, float]:
    """Return what opening a metadataset takes."""
    command = [python, str(ROOT / "benchmarks/blend_start.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def build(python: str, path: Path) -> dict[str, float]:
    """Return what building the index of a join takes, the start of the program included."""
    shutil.rmtree(f"{path}.cache", ignore_errors=True)
    begin = time.perf_counter()
    with subprocess.Popen(
        [str(Path(python).parent / "energon"), "prepare", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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


def page(
    starts: dict[str, list[dict[str, float]]],
    builds: dict[str, list[dict[str, float]]],
    rounds: int,
) -> str:
    """Return the page."""
    lines = [
        "# Benchmarks of metadatasets",
        "",
        f"Made by `benchmarks/blends.py` on {date.today()} with {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}: medians of {rounds} rounds, "
        "data in the page cache. See [all benchmarks](benchmarks.md).",
        "",
        f"## A blend of {DATASETS} datasets",
        "",
        f"Time from the call of `get_train_dataset` to the first batch of 32, without workers. "
        f"Each dataset has {SHARDS} shards. Descriptors and memory were measured after 300 "
        "batches.",
        "",
        "| | first batch, s | CPU for it, s | open descriptors | peak memory, MB |",
        "|---|---|---|---|---|",
    ]
    for name, found in starts.items():
        cells = [f"{middle(found, key):.2f}" for key in ("seconds", "cpu_seconds")]
        cells.append(f"{middle(found, 'descriptors'):.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {middle(found, 'memory_mb'):.0f} |")
    lines += [
        "",
        f"## The index of a join of two datasets of {JOINED:,} samples",
        "",
        "The whole command `energon prepare join.yaml`. The two datasets have 50 and 32 shards, "
        "and the same keys in different orders.",
        "",
        "| | seconds | CPU, s | peak memory, MB |",
        "|---|---|---|---|",
    ]
    for name, found in builds.items():
        cells = [f"{middle(found, key):.1f}" for key in ("seconds", "cpu_seconds")]
        lines.append(f"| {name} | {' | '.join(cells)} | {middle(found, 'memory_mb'):.0f} |")
    return "\n".join(lines) + "\n"


def middle(found: Sequence[dict[str, float]], key: str) -> float:
    """Return the median of a figure."""
    return median(each[key] for each in found)


if __name__ == "__main__":
    main()
