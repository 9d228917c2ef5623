"""Lanes that share the streams of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.plan.dealt import DealtPlan, plan_together
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe
from energon.plan.rows import COUNTED_ROWS
from tests.effort import mixed, some

LEAVES = (
    PlanLeaf("a", 700, weight=3.0, slice_samples=7, parallel_slices=3),
    PlanLeaf("b", 53, weight=1.0, slice_samples=128),
    PlanLeaf("c", 400, weight=2.0, slice_samples=100, repetitions=1.5),
)
KINDS = {
    "blend": {"kind": "blend", "shuffle_window": 10},
    "one leaf": {"kind": "blend", "leaves": LEAVES[:1]},
    "epochized": {"kind": "epochized"},
    "once": {"kind": "epochized", "repeat": False, "shuffle_window": 7},
    "in order": {"kind": "concat", "repeat": False},
}


def recipe_of(kind, streams, stripe=8):
    settings = {"leaves": LEAVES, "seed": 3, "stripe": stripe, **KINDS[kind]}
    return PlanRecipe(**settings, streams=streams)


def triples(rows):
    return list(zip(*(column.tolist() for column in rows), strict=True))


def global_batches(plan, count, stripe):
    """The first batches of all lanes, in the order of delivery; some may have nothing."""
    batches = []
    for number in range(count):
        turn, lane = divmod(number, plan.lanes)
        batches.append(triples(plan.rows(lane, turn * stripe, stripe)))
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "numbers"), mixed([*KINDS], [(1, 24), (2, 24), (3, 24), (4, 4), (5, 120)])
)
def test_the_batches_are_those_of_the_streams_however_many_lanes_there_are(kind, numbers):
    streams, lanes = numbers
    recipe = recipe_of(kind, streams)
    found = global_batches(recipe(lanes), 200, 8)
    assert found == global_batches(recipe.of_streams(streams), 200, 8)


@pytest.mark.parametrize("kind", ["once", "in order"])
def test_only_the_last_batch_of_a_stream_is_smaller(kind):
    plan = recipe_of(kind, 1)(24)
    sizes = [len(batch) for batch in global_batches(plan, 200, 8)]
    total = sum(sizes)
    assert sizes[: total // 8] == [8] * (total // 8)
    assert [size for size in sizes if size] == [8] * (total // 8) + [total % 8] * (total % 8 > 0)
    assert sum(plan.num_rows(lane) for lane in range(24)) == total


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(KINDS)),
    streams=st.integers(1, 4),
    number=st.integers(1, 6),
    stripe=st.integers(1, 9),
    start=st.integers(0, 400),
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_any_cuts_give_the_same_rows(kind, streams, number, stripe, start, counts):
    plan = recipe_of(kind, streams, stripe)(streams * number)
    for lane in range(plan.lanes):
        whole = triples(plan.rows(lane, start, sum(counts)))
        at, found = start, []
        for count in counts:
            found += triples(plan.rows(lane, at, count))
            at += count
        assert found == whole


@given(
    kind=st.sampled_from(sorted(KINDS)),
    streams=st.integers(1, 3),
    number=st.integers(1, 8),
    stripe=st.integers(1, 9),
    wanted=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_lanes_planned_together_get_what_each_gets_alone(kind, streams, number, stripe, wanted):
    plan = recipe_of(kind, streams, stripe)(streams * number)
    stream = wanted.draw(st.integers(0, streams - 1))
    parts = [
        (lane, wanted.draw(st.integers(0, 300)), wanted.draw(st.integers(0, 60)))
        for lane in range(stream, plan.lanes, streams)
    ]
    together = plan_together(plan, parts)
    assert [triples(rows) for rows in together] == [triples(plan.rows(*part)) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_found_where_they_come(kind):
    plan = recipe_of(kind, 2)(12)
    assert isinstance(plan, DealtPlan)
    for lane in range(plan.lanes):
        for row, triple in some([*enumerate(triples(plan.rows(lane, 0, 40)))], 4):
            assert plan.find(*triple) == (lane, row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [1, 9, COUNTED_ROWS // 8 + 40])
def test_leaves_are_counted_exactly_where_all_lanes_have_come_equally_far(kind, turns):
    plan = recipe_of(kind, 1)(24)
    ends = [plan.num_rows(lane) for lane in range(24)]
    rows = [turns * 8 if end is None else min(end, turns * 8) for end in ends]
    counts = sum(plan.leaf_counts(lane, row) for lane, row in zip(range(24), rows, strict=True))
    leaf = np.concatenate([plan.rows(lane, 0, row).leaf for lane, row in enumerate(rows)])
    assert np.abs(counts - np.bincount(leaf, minlength=len(counts))).max() < 0.01 * len(leaf) + 1
    assert abs(counts.sum() - len(leaf)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_leaf_of_a_row_is_known_without_the_rest(kind):
    for plan in (recipe_of(kind, 2)(12), recipe_of(kind, 2).of_streams(2)):
        for lane in range(plan.lanes):
            rows = np.array([31, 0, 7, 7, 12])
            assert plan.leaf_of(lane, rows).tolist() == plan.at(lane, rows).leaf.tolist()


def test_a_large_window_that_is_open_has_its_share_of_each_leaf():
    leaves = tuple(
        PlanLeaf(name, 10**6, weight=weight) for name, weight in (("a", 3.0), ("b", 1.0))
    )
    plan = PlanRecipe("blend", leaves, 0, stripe=8, streams=1, shuffle_window=40_000)(24)
    stream = plan.plan
    for row in (40_000 + COUNTED_ROWS, 60_000, 79_999, 80_000):
        counts = stream.leaf_counts(0, row)
        exact = np.bincount(stream.leaf_of(0, np.arange(row)), minlength=2)
        assert counts.sum() == pytest.approx(row)
        assert np.abs(counts - exact).max() < 0.005 * row
    assert stream.leaf_counts(0, 80_000).tolist() == exact.tolist()


def test_a_batch_of_small_data_has_no_sample_twice():
    """As with one lane: an epoch is drawn to its end before the next one begins."""
    leaf = PlanLeaf("tiny", 40, slice_samples=100)
    plan = PlanRecipe("blend", (leaf,), 0, stripe=8, streams=1)(24)
    for epoch in range(3):
        batches = [triples(plan.rows(number, 8 * turn, 8)) for turn, number in epoch_of(5, epoch)]
        assert sorted(ordinal for batch in batches for _, _, ordinal in batch) == list(range(40))


def epoch_of(batches, epoch):
    return [divmod(g, 24) for g in range(epoch * batches, (epoch + 1) * batches)]
