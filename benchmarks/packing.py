"""Measure packing of lengths like those of texts: padding, balance, evenness, time.

    python benchmarks/packing.py [--rounds 5] [--windows N] [--window N] [--context N]

Lengths are log-normal (median 700, sigma 0.9), cut at the context. Writes the table of
docs/packing.md: the share of padding, how much the sums of squared lengths vary between packs, how
many samples are read between two packs at most, how many are read while one of them waits, and
the CPU time per sample. Only the last one differs between rounds. Five rounds take half a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon.packing import Packer
from energon.plan.rows import Rows
from energon.stages.hooks.hook import Hook
from energon.stages.lane import BuiltBlock, Lane
from energon.stages.pack import PackDataset
from energon.stages.read import ReadDataset
from results import Benchmark, Case, Results, middle, rounds_of, shown, versions_of

PACKERS: dict[str, dict[str, Any]] = {
    "first-fit decreasing, closed windows": {"method": "first_fit", "carry": False},
    "fill, closed windows": {"carry": False},
    "fill, closed windows, balanced": {"carry": False, "balance": True},
    "first-fit decreasing, carry-over": {"method": "first_fit"},
    "fill, carry-over": {},
    "fill, carry-over, balanced": {"balance": True},
}
COLUMNS = (
    *("packer", "padding", "spread of ΣL²", "most samples read between two packs"),
    *("longest wait, in samples", "CPU µs a sample"),
)


@dataclass(frozen=True)
class Lengths:
    """A plan of endless rows, and their reader: row n is a sample of the n-th length."""

    context: int
    mean_sample_bytes: float = 1.0

    def rows(self, lane: int, start: int, count: int) -> Rows:
        rows = np.arange(start, start + count, dtype=np.int64)
        return Rows(np.zeros(count, np.int32), np.zeros(count, np.int64), rows)

    def read(self, rows: Rows) -> BuiltBlock:
        return BuiltBlock(
            [
                {"length": self._length(row), "row": row, "__restore_key__": (0, 0, row)}
                for row in rows.ordinal.tolist()
            ]
        )

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> None:
        return None

    def _length(self, row: int) -> int:
        drawn = np.random.default_rng(row).lognormal(np.log(700), 0.9)
        return int(np.clip(drawn, 1, self.context))


def main() -> None:
    """Measure, and write the table between the marks of the page."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--context", type=int, default=8192)
    arguments = BENCHMARK.parsed(parser)

    def of_packer(case: Case) -> dict[str, Any]:
        return measure(arguments, PACKERS[case["packer"]])

    BENCHMARK.run(
        arguments,
        [{"packer": name} for name in PACKERS],
        of_packer,
        versions_of(sys.executable, energon="energon-loader"),
        windows=arguments.windows,
        window=arguments.window,
        context=arguments.context,
    )


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a row of the table."""
    context, spent = arguments.context, [0.0]
    packer = Packer(context, lambda sample: sample["length"], **settings)

    def select(samples: list[Any]) -> Any:
        start = time.process_time()
        selection = packer(samples)
        spent[0] += time.process_time() - start
        return selection

    source = Lengths(context)
    stage = PackDataset(
        ReadDataset(lambda lanes: source, source),  # type: ignore[arg-type, return-value]
        arguments.window,
        select=Hook("select", select),
        pack=(Hook("pack", list),),
    )
    packs = stage.open(Lane(0, 1))
    tokens = count = samples = most = wait = 0
    squares = []
    read = None
    while samples < arguments.windows * arguments.window:
        pack = next(packs)
        lengths = [sample["length"] for sample in pack]
        newest = packs.inner.row  # type: ignore[attr-defined]
        most = max(most, 0 if read is None else newest - read)
        wait = max(wait, newest - pack[0]["row"])
        read = newest
        tokens += sum(lengths)
        count += 1
        samples += len(pack)
        squares.append(sum(length * length for length in lengths))
    return {
        "padding": 1 - tokens / (count * context),
        "spread_of_squares": float(np.std(squares) / np.mean(squares)),
        "most_samples_between_packs": most,
        "longest_wait": wait,
        "seconds_per_sample": spent[0] / samples,
    }


def tables(results: Results) -> str:
    """Return a row for each packer."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name in PACKERS:
        found = rounds_of(results, packer=name)
        lines.append(
            f"| {name} | {100 * middle(found, 'padding'):.2f} % "
            f"| {middle(found, 'spread_of_squares'):.2f} "
            f"| {middle(found, 'most_samples_between_packs'):.0f} "
            f"| {middle(found, 'longest_wait'):.0f} "
            f"| {shown(found, 'seconds_per_sample', scale=1e6)} |"
        )
    return "\n".join(lines)


BENCHMARK = Benchmark(
    __file__, tables, conditions="samples were numbers in memory", page="packing.md"
)

if __name__ == "__main__":
    main()
