from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe


def everything(plan):
    lanes = [plan.rows(lane, 0, 10**6) for lane in range(plan.lanes)]
    assert [len(rows.leaf) for rows in lanes] == [plan.num_rows(lane) for lane in range(plan.lanes)]
    return [triple for rows in lanes for triple in zip(*(c.tolist() for c in rows), strict=True)]


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from([0.5, 1, 1.25, 2, 3.7])),
        min_size=1,
        max_size=4,
    ),
    lanes=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_an_epochized_line_has_every_leaf_as_often_as_it_says(shapes, lanes):
    leaves = [
        PlanLeaf(str(i), n, repetitions=r, slice_samples=6) for i, (n, r) in enumerate(shapes)
    ]
    found = everything(PlanRecipe("epochized", tuple(leaves), 1, repeat=False)(lanes))
    assert len(set(found)) == len(found)
    for number, (n, r) in enumerate(shapes):
        counts = Counter(ordinal for leaf, _, ordinal in found if leaf == number)
        assert sum(counts.values()) == max(1, round(n * r))
        assert all(int(r) <= counts[ordinal] <= int(r) + 1 for ordinal in range(n))


def test_a_fraction_of_a_leaf_is_another_one_in_every_epoch():
    plan = PlanRecipe("epochized", (PlanLeaf("a", 1000, repetitions=0.1),), 0, repeat=True)(1)
    first, second = (set(plan.rows(0, start, 100).ordinal.tolist()) for start in (0, 100))
    assert len(first) == len(second) == 100
    assert len(first & second) < 100


def test_a_repeated_line_is_mixed_anew():
    plan = PlanRecipe("epochized", (PlanLeaf("a", 300),), 0, repeat=True)(1)
    first, second = plan.rows(0, 0, 300), plan.rows(0, 300, 300)
    assert sorted(first.ordinal.tolist()) == sorted(second.ordinal.tolist()) == list(range(300))
    assert first.ordinal.tolist() != second.ordinal.tolist()
    assert set(second.epoch.tolist()) == {1}


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    lanes=st.integers(1, 9),
    stripe=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_validation_gives_each_sample_once_in_the_order_of_batches(sizes, lanes, stripe):
    leaves = [PlanLeaf(str(i), n) for i, n in enumerate(sizes)]
    plan = PlanRecipe("concat", tuple(leaves), 0, stripe=stripe)(lanes)
    expected = [(i, 0, o) for i, n in enumerate(sizes) for o in range(n)]
    assert sorted(everything(plan)) == expected
    batches = {}
    for lane in range(lanes):
        rows = list(zip(*(c.tolist() for c in plan.rows(lane, 0, 10**6)), strict=True))
        for start in range(0, len(rows), stripe):
            batches[start // stripe * lanes + lane] = rows[start : start + stripe]
    assert [row for g in sorted(batches) for row in batches[g]] == expected


def test_rows_beyond_the_end_are_empty():
    plan = PlanRecipe("concat", (PlanLeaf("a", 5),), 0)(8)
    assert plan.num_rows(6) == 0
    assert [len(column) for column in plan.rows(6, 0, 10)] == [0, 0, 0]
    assert plan.rows(0, 3, 10).ordinal.dtype == np.int64
