from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.blends.curve import Curve, Point
from energon.plan.blends.mix import Mix, MixEntry
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.randomness import permute, unpermute
from energon.plan.recipe import PlanRecipe
from tests.plan.test_leaf import block_lists, leaf_of


@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(0, 2**63)), min_size=1, max_size=20))
def test_a_permutation_can_be_undone(pairs):
    sizes = np.array([size for size, _ in pairs])
    keys = np.array([key for _, key in pairs], np.uint64)
    indices = keys.astype(np.int64) % sizes
    assert unpermute(permute(indices, sizes, keys), sizes, keys).tolist() == indices.tolist()


def check_found(plan, count, *, leaves):
    """Every row is found by what comes there, and no sample is found at another row."""
    places = {}
    for lane in range(plan.lanes):
        rows = plan.rows(lane, 0, count)
        for row, triple in enumerate(zip(*(c.tolist() for c in rows), strict=True)):
            places[triple] = lane, row
            if row % 7 == 0:
                assert plan.find(*triple) == (lane, row)
    for leaf, n in enumerate(leaves):
        for ordinal in range(0, n, 3):
            for epoch in range(3):
                found = plan.find(leaf, epoch, ordinal)
                known = places.get((leaf, epoch, ordinal))
                assert found == known or (known is None and found[1] >= count)


MULTIPLIERS = st.sampled_from([1, 2, None])


@given(
    leaf=st.builds(
        PlanLeaf,
        st.just("a"),
        st.integers(1, 400),
        slice_samples=st.sampled_from([1, 4, 30]),
        parallel_slices=st.sampled_from([1, 3]),
        shuffle_over_epochs=MULTIPLIERS,
    )
    | st.builds(leaf_of, block_lists, shuffle_over_epochs=MULTIPLIERS),
    lanes=st.sampled_from([1, 3, 8, 40, 64]),
    window=st.sampled_from([0, 7]),
)
@settings(max_examples=80, deadline=None)
def test_a_sample_of_a_leaf_is_found_in_any_epoch(leaf, lanes, window):
    plan = PlanRecipe("blend", (leaf,), 4, shuffle_window=window)(lanes)
    for ordinal in {0, leaf.num_samples // 2, leaf.num_samples - 1}:
        for epoch in (0, 1, 5, 10**6):
            lane, row = plan.find(0, epoch, ordinal)
            (found,) = zip(*(c.tolist() for c in plan.rows(lane, row, 1)), strict=True)
            assert found == (0, epoch, ordinal)


@given(
    lanes=st.sampled_from([1, 4]),
    unit=st.sampled_from([1, 4]),
    window=st.sampled_from([0, 5]),
    repetitions=st.sampled_from([1, 1.5]),
)
@settings(max_examples=10, deadline=None)
def test_a_sample_is_found_through_schedules_limits_lines_and_windows(
    lanes, unit, window, repetitions
):
    sizes = [10, 17, 30, 9]
    leaves = [
        PlanLeaf(str(i), n, slice_samples=3, repetitions=repetitions if i == 1 else 1)
        for i, n in enumerate(sizes)
    ]
    ramp = Curve((Point(0, 1.0), Point(60, 4.0, True), Point(150, 0.5)))
    mix = Mix(
        (MixEntry(0, ramp), MixEntry(1, Curve.constant(2), 1), MixEntry(2, Curve.constant(1), 2))
    )
    sources = ((0,), (1, 2), (3,))
    recipe = PlanRecipe(
        "blend", tuple(leaves), 3, sources=sources, mix=mix, unit=unit, shuffle_window=window
    )
    check_found(recipe(lanes), 240 // lanes, leaves=sizes)


@given(
    lanes=st.integers(1, 5), repeat=st.booleans(), shuffle=st.booleans(), stripe=st.integers(1, 4)
)
@settings(max_examples=10, deadline=None)
def test_a_sample_of_a_line_is_found(lanes, repeat, shuffle, stripe):
    leaves = [
        PlanLeaf("a", 12, repetitions=2.25, shuffle_over_epochs=1 if shuffle else None),
        PlanLeaf("b", 7, shuffle_over_epochs=1 if shuffle else None),
    ]
    plan = PlanRecipe("epochized", tuple(leaves), 1, repeat=repeat, stripe=stripe)(lanes)
    check_found(plan, 100, leaves=[12, 7])


def test_a_sample_of_validation_is_found():
    plan = PlanRecipe("concat", (PlanLeaf("a", 12), PlanLeaf("b", 7)), 0, stripe=2)(3)
    check_found(plan, 100, leaves=[12, 7])


def test_with_replacement_there_is_no_such_place():
    plan = PlanRecipe("blend", (PlanLeaf("a", 12, shuffle_over_epochs=-1),), 0)(3)
    with pytest.raises(ConfigError, match="a is drawn with replacement"):
        plan.find(0, 0, 0)
