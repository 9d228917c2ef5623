"""Measure packing of lengths like those of texts: padding, balance, evenness, time.

    python benchmarks/packing.py [--windows N] [--window N] [--context N]

Lengths are log-normal (median 700, sigma 0.9), cut at the context. Writes the table of
docs/packing.md: the share of padding, how much the sums of squared lengths vary between packs, how
many samples are read between two packs at most, how many are read while one of them waits, and
the CPU time per sample.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from energon.packing import Packer
from energon.plan.rows import Rows
from energon.stages.hooks.hook import Hook
from energon.stages.lane import Lane
from energon.stages.pack import PackDataset
from energon.stages.reading.blocks import RowsAtOnce
from energon.stages.reading.read import ReadDataset

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
PAGE = Path(__file__).parents[1] / "docs/packing.md"
MARK = "<!-- made by benchmarks/packing.py -->"


@dataclass(frozen=True)
class Lengths:
    """A plan of endless rows, and their reader: row n is a sample of the n-th length."""

    context: int
    mean_sample_bytes: float = 1.0

    def rows(self, lane: int, start: int, count: int) -> Rows:
        rows = np.arange(start, start + count, dtype=np.int64)
        return Rows(np.zeros(count, np.int32), np.zeros(count, np.int64), rows)

    def read_lazily(self, rows: Rows) -> RowsAtOnce:
        return RowsAtOnce(
            [
                {"length": self._length(row), "row": row, "__restore_key__": (0, 0, row)}
                for row in rows.ordinal.tolist()
            ]
        )

    def read_ahead(self, lanes_of_stream: int) -> None:
        return None

    def _length(self, row: int) -> int:
        drawn = np.random.default_rng(row).lognormal(np.log(700), 0.9)
        return int(np.clip(drawn, 1, self.context))


def main() -> None:
    """Measure, and write the table between the marks of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    table = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    for name, settings in PACKERS.items():
        table += f"\n| {name} | {' | '.join(measure(arguments, settings))} |"
    head, _, tail = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{head}{MARK}\n\n{table}\n\n{MARK}{tail}")


def measure(arguments: argparse.Namespace, settings: dict[str, Any]) -> tuple[str, ...]:
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
    spread = np.std(squares) / np.mean(squares)
    padding = 1 - tokens / (count * context)
    microseconds = 1e6 * spent[0] / samples
    return f"{100 * padding:.2f} %", f"{spread:.2f}", str(most), str(wait), f"{microseconds:.0f}"


if __name__ == "__main__":
    main()
