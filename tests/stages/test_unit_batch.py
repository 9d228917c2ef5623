from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.stages.base import Dataset, DatasetIterator, unpack
from energon.stages.batch import UnitBatchDataset
from energon.stages.lane import Lane
from energon.testing import check_resume


@dataclass(frozen=True)
class Rows(Dataset):
    """The rows of a lane, without those that are skipped."""

    count: int
    skipped: frozenset

    def _open(self, lane):
        return _RowIterator(self)

    def num_items(self, lane, lanes):
        return self.count


class _RowIterator(DatasetIterator):
    def __init__(self, stage):
        self.stage = stage
        self.at = 0

    @property
    def row(self):
        return self.at

    @property
    def item_state(self):
        return self.at - 1

    def __next__(self):
        while self.at < self.stage.count:
            self.at += 1
            if self.at - 1 not in self.stage.skipped:
                return self.at - 1
        raise StopIteration

    def state_dict(self):
        return {"row": self.at}

    def load_state_dict(self, state):
        (self.at,) = unpack(state, {"row": int})


@given(
    count=st.integers(0, 40),
    size=st.integers(1, 7),
    skipped=st.frozensets(st.integers(0, 40), max_size=30),
)
def test_a_batch_is_what_is_left_of_a_unit_or_repeats_it(count, size, skipped):
    stage = UnitBatchDataset(Rows(count, skipped), size, unit_rows=size)
    units = [
        [row for row in range(start, min(start + size, count)) if row not in skipped]
        for start in range(0, count, size)
    ]
    assert check_resume(stage, limit=50, lanes=1) == [unit for unit in units if unit]
    assert stage.num_items(0, 1) == len(units)
    sizes = [min(size, count - start) for start in range(0, count, size)]
    repeating = replace(stage, repeats=True)
    assert check_resume(repeating, limit=50, lanes=1) == [
        list(islice(cycle(unit), rows)) for unit, rows in zip(units, sizes, strict=True) if unit
    ]


@pytest.mark.parametrize(("count", "expected"), [(8, [[0, 2, 3], [4, 5, 6, 7]]), (6, [[0, 2, 3]])])
@pytest.mark.parametrize("repeats", [False, True])
def test_the_last_batch_may_be_dropped_where_the_data_end_early(count, expected, repeats):
    rows = Rows(count, frozenset({1}))
    stage = UnitBatchDataset(rows, 4, drop_last=True, unit_rows=4, repeats=repeats)
    lane = Lane(0, 1)
    assert list(stage.open(lane)) == [
        (each + each[:1])[:4] if repeats else each for each in expected
    ]
    assert lane.counts["samples"] == sum(map(len, expected))
    assert lane.counts["repeated"] == repeats


def test_a_batch_that_is_full_after_repeating_is_not_dropped():
    stage = UnitBatchDataset(Rows(8, frozenset({7})), 4, drop_last=True, unit_rows=4)
    assert len(list(stage.open(Lane(0, 1)))) == 1
    assert list(replace(stage, repeats=True).open(Lane(0, 1)))[1] == [4, 5, 6, 4]
