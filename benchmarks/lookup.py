"""Measure the look-up of files by name in a dataset of many samples, by several threads.

    python benchmarks/lookup.py [--rounds 5] [--samples 1000000] [--data FOLDER] [--peers PYTHON]

Writes the dataset first if it is not there, and the table of docs/aux.md. Names are random, and the
index is warm. Figures are microseconds for each file: wall time of all threads divided by the
number of files that they have asked for. Each round has a fresh process. Five rounds take about
two minutes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import Benchmark, Case, Results, in_fresh_process, rounds_of, shown, versions_of

PER_SHARD = 10_000
THREADS = (1, 2, 4, 8)
ASKED = 20_000
TOGETHER = 64
LIBRARIES = ("energon (this)", "Megatron-Energon")
FIGURES = {
    "look-up": "whether a name is there",
    "file": "a file",
    "neighbors": f"a file, with {TOGETHER} neighbors at a time",
    "together": f"a file, with {TOGETHER} others at a time",
}


def main() -> None:
    """Measure, and write the table between the marks of the page."""
    parser = BENCHMARK.parser(__doc__, data="lookup")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--one", choices=LIBRARIES)
    arguments = BENCHMARK.parsed(parser)
    if arguments.one:
        names = random.Random(0).choices(range(arguments.samples), k=ASKED)
        measure = ours if arguments.one == LIBRARIES[0] else peer
        print(json.dumps(measure(arguments.data, [f"{number:08}.txt" for number in names])))
        return
    if not (arguments.data / ".nv-meta/.info.json").exists():
        write(arguments.data, arguments.samples)
    options = ["--data", str(arguments.data), "--samples", str(arguments.samples), "--one"]

    def fresh(case: Case) -> dict[str, Any]:
        is_peer = case["library"] != LIBRARIES[0]
        python = arguments.peers if is_peer else sys.executable
        return in_fresh_process([python, __file__, *options, case["library"]], peer=is_peer)

    versions = versions_of(sys.executable, energon="energon-loader")
    versions |= versions_of(arguments.peers, **{"Megatron-Energon": "megatron-energon"})
    cases = [{"library": library} for library in LIBRARIES]
    BENCHMARK.run(arguments, cases, fresh, versions, samples=arguments.samples)


def write(folder: Path, samples: int) -> None:
    """Write and prepare a dataset of small texts."""
    from energon import ShardWriter
    from energon.prepare.dataset import prepare_dataset

    with ShardWriter(f"{folder}/shards/%04d.tar", maxcount=PER_SHARD) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:08}", "txt": b"text %08d" % number})
    prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")


def ours(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Measure this library."""
    from energon.sources.files.samples import WebdatasetFileStore

    store = WebdatasetFileStore(folder)
    store.get_raw(names[0])
    near = sorted(names[: ASKED // TOGETHER])
    runs = [[f"{int(name[:8]) + n:08}.txt" for n in range(TOGETHER)] for name in near]
    runs = [[name for name in run if name in store] for run in runs]
    chunks = [names[at : at + TOGETHER] for at in range(0, len(names), TOGETHER)]
    return {
        **seconds("look-up", lambda name: name in store, names),
        **seconds("file", store.get_raw, names),
        **seconds("neighbors", store.get_many_raw, runs, files=sum(map(len, runs))),
        **seconds("together", store.get_many_raw, chunks),
    }


def peer(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Measure Megatron-Energon."""
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    store = WebdatasetFileStore(EPath(str(folder)))
    return seconds("file", lambda name: store[name], names)


def seconds(
    figure: str, ask: Callable[[Any], object], arguments: Sequence[Any], *, files: int = ASKED
) -> dict[str, float]:
    """Return the seconds for each file, by the number of threads."""
    found = {}
    for threads in THREADS:
        parts = [arguments[number::threads] for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(lambda part: [ask(argument) for argument in part], parts))
            found[f"{figure}, {threads}"] = (time.perf_counter() - start) / files
    return found


def tables(results: Results) -> str:
    """Return microseconds by what is asked for and the number of threads."""
    lines = [
        f"| µs for each file | {' | '.join(f'threads: {n}' for n in THREADS)} |",
        "|---|" + "---|" * len(THREADS),
    ]
    mine, theirs = (rounds_of(results, library=library) for library in LIBRARIES)
    asked = [(title, figure, mine) for figure, title in FIGURES.items()]
    asked.append(("a file, Megatron-Energon", "file", theirs))
    for title, figure, found in asked:
        cells = [shown(found, f"{figure}, {n}", 1, scale=1e6) for n in THREADS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, page="aux.md")

if __name__ == "__main__":
    main()
