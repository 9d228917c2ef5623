from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe


@given(n=st.integers(1, 200), lanes=st.integers(1, 5), size=st.integers(2, 70))
@settings(max_examples=60, deadline=None)
def test_each_window_holds_the_rows_it_held_before(n, lanes, size):
    leaves = [PlanLeaf("a", n, shuffle_over_epochs=None)]
    recipe = PlanRecipe("epochized", tuple(leaves), 4, repeat=False)
    plain, mixed = recipe(lanes), replace(recipe, shuffle_window=size)(lanes)
    for lane in range(lanes):
        before, after = (plan.rows(lane, 0, n).ordinal.tolist() for plan in (plain, mixed))
        for start in range(0, len(before), size):
            assert sorted(before[start : start + size]) == sorted(after[start : start + size])


def test_windows_mix():
    plan = PlanRecipe(
        "epochized",
        (PlanLeaf("a", 1000, shuffle_over_epochs=None),),
        0,
        repeat=False,
        shuffle_window=100,
    )(1)
    first = plan.rows(0, 0, 100).ordinal.tolist()
    assert first != sorted(first)
