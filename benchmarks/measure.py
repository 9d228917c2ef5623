"""Measure one library on one dataset in this process, and print a JSON line.

python benchmarks/measure.py LIBRARY PATH --workers N --batch-size B --shuffle S [--program P]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from statistics import median


def process_tree() -> list[int]:
    """Return the ids of this process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += parents.get(pid, [])
    return found


def tree_cpu_seconds() -> float:
    """Return the CPU time that this process and its descendants have taken."""
    ticks = 0
    for pid in process_tree():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # Of the process, and of those of its children that have ended.
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def tree_pss_bytes() -> int:
    """Return the proportional memory of this process and its descendants."""
    total = 0
    for pid in process_tree():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("path")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shuffle", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--windows", type=int, default=1, help="So many times these seconds.")
    parser.add_argument("--program", help="one of adapters/programs.py; default: a cooker")
    parser.add_argument("--warm", type=float, default=1.5, help="Seconds before it is counted.")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from adapters.programs import count

    start = time.perf_counter()
    adapter = import_module(f"adapters.{arguments.library}")
    imported = time.perf_counter() - start
    start = time.perf_counter()
    program = arguments.program or "cooker"
    named = {} if arguments.program is None else {"program": program}
    batches = adapter.batches(
        arguments.path, arguments.workers, arguments.batch_size, arguments.shuffle, **named
    )
    next(batches)
    first = time.perf_counter() - start
    warm_until = time.perf_counter() + arguments.warm
    while time.perf_counter() < warm_until:
        next(batches)
    load = os.getloadavg()[0]
    rates, costs = [], []
    for _ in range(arguments.windows):
        done, cpu, start = 0, tree_cpu_seconds(), time.perf_counter()
        while (elapsed := time.perf_counter() - start) < arguments.seconds:
            done += count(next(batches), program)
        rates.append(done / elapsed)
        costs.append(1000 * (tree_cpu_seconds() - cpu) / done)
    result = {
        "version": adapter.VERSION,
        "samples_per_second": median(rates),
        "cpu_seconds_per_1000": median(costs),
        "spread": (max(rates) - min(rates)) / 2 / median(rates),
        "first_batch_seconds": first,
        "import_seconds": imported,
        "pss_mb": tree_pss_bytes() / 1e6,
        "load_before": load,
        "priority": -os.getpriority(os.PRIO_PROCESS, 0),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # Loaders of some libraries do not end by themselves, nor do their workers.
    for pid in process_tree()[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
