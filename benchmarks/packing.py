"""Measure packing of lengths like those of texts: padding, balance, evenness, time.

    python benchmarks/packing.py [--windows N] [--window N] [--context N]

Lengths are log-normal (median 700, sigma 0.9), cut at the context. Prints a table: what share of
the packs is padding, how much the sums of squared lengths vary between packs, how many samples
are read between two packs at most, how long a sample waits at most, and the time per sample.
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
from energon.stages.hook import Hook
from energon.stages.lane import Lane
from energon.stages.pack import PackDataset
from energon.stages.read import ReadDataset

PACKERS: dict[str, dict[str, Any]] = {
    "first-fit decreasing": {"method": "first_fit", "carry": False},
    "exact filling": {"carry": False},
    "exact filling, balanced": {"carry": False, "balance": True},
    "first-fit decreasing, carry-over": {"method": "first_fit"},
    "exact filling, carry-over": {},
    "exact filling, carry-over, balanced": {"balance": True},
}


@dataclass(frozen=True)
class Lengths:
    """A plan of endless rows, and their reader: row n is a sample of the n-th length."""

    context: int
    mean_sample_bytes: float = 1.0

    def rows(self, lane: int, start: int, count: int) -> Rows:
        rows = np.arange(start, start + count, dtype=np.int64)
        return Rows(np.zeros(count, np.int32), np.zeros(count, np.int64), rows)

    def read(self, rows: Rows) -> list[dict[str, Any]]:
        return [
            {"length": self._length(row), "row": row, "__restore_key__": (0, 0, row)}
            for row in rows.ordinal.tolist()
        ]

    def read_ahead(self, lanes_of_stream: int) -> None:
        return None

    def _length(self, row: int) -> int:
        drawn = np.random.default_rng(row).lognormal(np.log(700), 0.9)
        return int(np.clip(drawn, 1, self.context))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    out = sys.stdout.write
    out("| packer | padding | spread of squares | most read | longest wait | µs a sample |\n")
    out("|---|---|---|---|---|---|\n")
    for name, settings in PACKERS.items():
        out(f"| {name} | {measure(arguments, settings)} |\n")


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> str:
    """Return the cells of a line of the table."""
    context, spent = arguments.context, [0.0]
    packer = Packer(context, lambda sample: sample["length"], **settings)

    def select(samples: list[Any]) -> Any:
        start = time.perf_counter()
        selection = packer(samples)
        spent[0] += time.perf_counter() - start
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
    spread = np.std(squares) / np.mean(squares)
    padding = 1 - tokens / (count * context)
    microseconds = 1e6 * spent[0] / samples
    return f"{padding:.2%} | {spread:.2f} | {most} | {wait} | {microseconds:.0f}"


if __name__ == "__main__":
    main()
