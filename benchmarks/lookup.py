"""Measure the look-up of files by name in a dataset of many samples, by several threads.

    python benchmarks/lookup.py [--samples 1000000] [--data FOLDER] [--peer PYTHON]

Writes the dataset first if it is not there. Names are random, the index is warm, and files are
in the page cache. Prints a table: microseconds for each file, wall time of all threads divided
by the number of files that they have asked for, best of five rounds. `--peer` measures
Megatron-Energon, installed for that Python, on the same dataset.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PER_SHARD = 10_000
THREADS = (1, 2, 4, 8)
ASKED = 20_000
TOGETHER = 64
ROUNDS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data-made/lookup")
    parser.add_argument("--peer", help="Python for which Megatron-Energon is installed.")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [f"{n:08}.txt" for n in random.Random(0).choices(range(arguments.samples), k=ASKED)]
    if arguments.as_peer:
        measure_peer(arguments.data, names)
        return
    if not (arguments.data / ".nv-meta/.info.json").exists():
        write(arguments.data, arguments.samples)
    measure_ours(arguments.data, names)
    if arguments.peer:
        again = [arguments.peer, __file__, "--as-peer", "--data", str(arguments.data)]
        subprocess.run([*again, "--samples", str(arguments.samples)], check=True)


def write(folder: Path, samples: int) -> None:
    """Write and prepare a dataset of small texts."""
    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    with ShardWriter(f"{folder}/shards/%04d.tar", maxcount=PER_SHARD) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:08}", "txt": b"text %08d" % number})
    prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")


def measure_ours(folder: Path, names: Sequence[str]) -> None:
    """Measure this library."""
    from energon.sources.files.webdataset import WebdatasetFileStore

    start = time.perf_counter()
    store = WebdatasetFileStore(folder)
    store.get_raw(names[0])
    say(f"first file, which builds the index: {time.perf_counter() - start:.2f} s")
    show("look-up", lambda name: name in store, names)
    show("file", store.get_raw, names)
    near = sorted(names[: ASKED // TOGETHER])
    runs = [[f"{int(name[:8]) + n:08}.txt" for n in range(TOGETHER)] for name in near]
    runs = [[name for name in run if name in store] for run in runs]
    show(f"file, {TOGETHER} neighbors", store.get_many_raw, runs, each=sum(map(len, runs)))
    chunks = [names[at : at + TOGETHER] for at in range(0, len(names), TOGETHER)]
    show(f"file, {TOGETHER} at a time", store.get_many_raw, chunks, each=len(names))


def measure_peer(folder: Path, names: Sequence[str]) -> None:
    """Measure Megatron-Energon."""
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    store = WebdatasetFileStore(EPath(str(folder)))
    show("Megatron-Energon: file", lambda name: store[name], names)


def show(
    title: str, ask: Callable[[Any], object], arguments: Sequence[Any], *, each: int = ASKED
) -> None:
    """Print a line of the table."""
    found = []
    for threads in THREADS:
        parts = [arguments[number::threads] for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            seconds = min(_seconds(pool, ask, parts) for _ in range(ROUNDS))
        found.append(f"{1e6 * seconds / each:6.1f}")
    say(
        f"{title:26} "
        + "  ".join(f"{n} threads {us} us" for n, us in zip(THREADS, found, strict=True))
    )


def _seconds(
    pool: ThreadPoolExecutor, ask: Callable[[Any], object], parts: Sequence[Sequence[Any]]
) -> float:
    start = time.perf_counter()
    list(pool.map(lambda part: [ask(argument) for argument in part], parts))
    return time.perf_counter() - start


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
