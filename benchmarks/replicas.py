"""Measure how the processes of a host get their batches, and write docs/benchmarks_parts.md.

    python benchmarks/replicas.py [--rounds 3] [--only WORD] [--data FOLDER]

Four processes, with two workers for each process that loads. Batches are 425 images, stored as
arrays, of 64 MB. All processes read each batch once, and wait for each other after it; delays are
those of paced steps, for which a batch is ready. Then come eight data-parallel ranks with batches
of 53 images, with two workers each, or two for all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pinned import write
from results import Benchmark, Case, Results, in_fresh_process, rounds_of, shown, versions_of

BATCH_SIZE = 425
PROCESSES = 4
WAYS = {
    "one": "one loads, for itself",
    "replica": "one loads for all (`WorkerConfig.from_mesh`)",
    "each": "each loads the same",
    "tensors": "one loads, `broadcast` of each tensor",
    "objects": "one loads, `broadcast_object_list`",
}
RANKS = 8
RANKS_BATCH_SIZE = 53
RANK_WAYS = {
    "ranks": "2 workers of each rank",
    "shared": '`shared_workers="host"`, 2 workers',
}
PROGRAM = Path(__file__).parent / "adapters" / "in_replica.py"


def main() -> None:
    """Measure, and write the results and the page."""
    arguments = BENCHMARK.parsed(BENCHMARK.parser(__doc__))
    folder = arguments.data / "arrays"
    if not folder.exists():
        write(folder)

    def measure(case: Case) -> dict[str, Any]:
        number, way, size = PROCESSES, case["way"], BATCH_SIZE
        if way in RANK_WAYS:
            number, size = RANKS, RANKS_BATCH_SIZE
        command = [sys.executable, str(PROGRAM), str(number), way, str(folder), str(size)]
        return in_fresh_process(command, peer=False, seconds=200)

    versions = versions_of(sys.executable, energon="energon-loader", torch="torch")
    BENCHMARK.run(arguments, cases(), measure, versions)


def cases() -> list[Case]:
    """Return the cases."""
    return [{"way": way} for way in (*WAYS, *RANK_WAYS)]


def tables(results: Results) -> str:
    """Return the tables of the page."""
    lines = [
        "| way of the batch | batches/s | CPU per batch, all processes | memory, all processes "
        "| last has it, paced | last has read it, paced |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way, title in WAYS.items():
        rounds = rounds_of(results, way=way)
        delays = [
            "" if way in ("one", "each") else shown(rounds, name, 1, unit=" ms")
            for name in ("delay_ms", "read_delay_ms")
        ]
        lines.append(
            f"| {title} | {shown(rounds, 'batches_per_second', 1)} | "
            f"{shown(rounds, 'cpu_ms_per_batch', unit=' ms')} | "
            f"{shown(rounds, 'memory_mb', unit=' MB')} | {' | '.join(delays)} |"
        )
    measured = {case["way"] for case in results["cases"]}
    if measured >= RANK_WAYS.keys():
        ranks = {way: rounds_of(results, way=way) for way in RANK_WAYS}
        lines += [
            "",
            "| eight data-parallel ranks | batches/s of each | CPU per step | memory "
            "| of workers |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {RANK_WAYS[way]} | {shown(rounds, 'batches_per_second', 1)} | "
            f"{shown(rounds, 'cpu_ms_per_batch', unit=' ms')} | "
            f"{shown(rounds, 'memory_mb', unit=' MB')} | "
            f"{shown(rounds, 'workers_mb', unit=' MB')} |"
            for way, rounds in ranks.items()
        ]
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables, page="benchmarks_parts.md")

if __name__ == "__main__":
    main()
