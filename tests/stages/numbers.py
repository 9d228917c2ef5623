"""A plan and a reader of numbers: sample `n` of lane v of V is the dict {"n": n·V + v}."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from energon.plan.rows import Rows
from energon.stages.lane import BuiltBlock
from energon.stages.read import ReadDataset


@dataclass(frozen=True)
class NumberPlan:
    lanes: int
    total: int | None
    leaf: int = 0

    def rows(self, lane: int, start: int, count: int) -> Rows:
        if self.total is not None:
            count = max(0, min(count, self.num_rows(lane) - start))
        return self.at(lane, np.arange(start, start + count, dtype=np.int64))

    def at(self, lane: int, rows: np.ndarray, *, gaps: bool = False) -> Rows:
        return self.samples(*self.numbers(lane, rows))

    def numbers(self, lane: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(rows), self.leaf, np.int32), rows * self.lanes + lane

    def samples(self, source: np.ndarray, numbers: np.ndarray, *, gaps: bool = False) -> Rows:
        return Rows(source, np.zeros(len(source), np.int64), numbers)

    def num_rows(self, lane: int) -> int | None:
        return None if self.total is None else -(-(self.total - lane) // self.lanes)


@dataclass(frozen=True)
class NumberReader:
    mean_sample_bytes: float = 1.0
    reads: list[int] = field(default_factory=list)

    def read(self, rows: Rows) -> BuiltBlock:
        self.reads.append(len(rows.leaf))
        return BuiltBlock(
            [
                {"n": ordinal, "__restore_key__": (leaf, 0, ordinal)}
                for leaf, ordinal in zip(rows.leaf.tolist(), rows.ordinal.tolist(), strict=True)
            ]
        )

    def read_ahead(self, lanes_of_stream: int, mixed_rows: int = 0) -> None:
        return None


def numbers(
    total: int | None, *, mean_sample_bytes: float = 1.0, leaf: int | None = None
) -> ReadDataset:
    return ReadDataset(
        lambda lanes: NumberPlan(lanes, total, leaf or 0),
        NumberReader(mean_sample_bytes=mean_sample_bytes),
        leaf=leaf,
    )


def taken(iterator, count: int) -> list:
    """Return the next `count` items; fewer only at the end."""
    items: list = []
    while len(items) < count:
        more, places = iterator.take(count - len(items))
        assert len(more) == len(places)
        if not more:
            break
        items += more
    return items
