"""Measure the lanes of a new run against one for each worker, for docs/benchmarks_parts.md.

    python benchmarks/lanes.py [--rounds 5] [--only WORD] [--scale 0.1] [--data FOLDER]

Both numbers run the same programs on the same data, and have a fresh process for every figure.
Five rounds take about five minutes.
"""

from __future__ import annotations

import sys
from itertools import product
from statistics import median
from typing import Any

from data import SAMPLES, SHARDS, write
from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    ratio,
    rounds_of,
    spread,
    versions_of,
)
from run import prepare

KINDS = ("text", "interleaved", "image")
PROGRAMS = {"plain": "no hook", "cooker": "cooker that passes samples on"}
WORKERS = (0, 2)
RUNS = ("for each worker", "default")
ROWS = list(product(KINDS, PROGRAMS, WORKERS))
FIGURES = {"cpu_seconds_per_1000": (1000, 1), "pss_mb": (1, 0)}
"""By what a figure is multiplied, and its digits."""


def main() -> None:
    """Measure, and write the page."""
    parser = BENCHMARK.parser(__doc__, data="lanes")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a window of measuring")
    parser.add_argument("--windows", type=int, default=3, help="in each process")
    parser.add_argument("--scale", type=float, default=0.1)
    arguments = BENCHMARK.parsed(parser)
    for kind in KINDS:
        count = int(SAMPLES[kind] * arguments.scale)
        write(arguments.data / kind, kind, num_samples=count, num_shards=SHARDS[kind])
        prepare(arguments.data / kind, "--sample-type", "CrudeWebdataset")
    options = ["--seconds", str(arguments.seconds), "--windows", str(arguments.windows)]

    def fresh(case: Case) -> dict[str, Any]:
        command = [sys.executable, str(ROOT / "benchmarks/measure.py"), "ours"]
        command += [str(arguments.data / case["data"]), "--program", case["program"]]
        command += ["--workers", str(case["workers"]), "--warm", "0.5", *options]
        single = {"BENCHMARKED_LANES": str(max(1, case["workers"]))}
        return in_fresh_process(command, **({} if case["lanes"] == "default" else single))

    cases = [
        {"data": kind, "program": program, "workers": workers, "lanes": lanes}
        for (kind, program, workers), lanes in product(ROWS, RUNS)
    ]
    BENCHMARK.run(
        arguments,
        cases,
        fresh,
        versions_of(sys.executable, energon="energon-loader"),
        scale=arguments.scale,
        seconds=arguments.seconds,
        windows=arguments.windows,
    )


def tables(results: Results) -> str:
    """Return both figures of all programs, and what the lanes cost in the median."""
    lines = [
        "| data | program | workers | CPU ms for 1,000 samples | memory, MB |",
        "|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {name: [] for name in FIGURES}
    for kind, program, workers in ROWS:
        both = [
            rounds_of(results, data=kind, program=program, workers=workers, lanes=lanes)
            for lanes in RUNS
        ]
        cells = []
        for name, (scale, digits) in FIGURES.items():
            figures = " / ".join(
                f"{scale * middle(rounds, name):,.{digits}f} {spread(rounds, name)}"
                for rounds in both
            )
            ratios[name].append(ratio(*reversed(both), name))  # type: ignore[misc]
            cells.append(f"{figures} ({ratios[name][-1]:.2f} x)")
        lines.append(f"| {kind} | {PROGRAMS[program]} | {workers} | {' | '.join(cells)} |")
    cpu, memory = map(median, ratios.values())
    lines += [
        "",
        f"In the median, the default takes {cpu:.2f} times the CPU time and {memory:.2f} times the "
        "memory. Ratios within the spread are not significant.",
    ]
    return "\n".join(lines)


BENCHMARK = Benchmark(__file__, tables)

if __name__ == "__main__":
    main()
