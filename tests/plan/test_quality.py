from __future__ import annotations

import numpy as np

from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.randomness import shuffle_quality
from energon.plan.recipe import PlanRecipe

N = 20_000


def quality_of(slice_samples, window=0):
    leaf = PlanLeaf("leaf", N, slice_samples=slice_samples)
    plan = PlanRecipe("blend", (leaf,), 0, shuffle_window=window)(1)
    return shuffle_quality(plan.rows(0, 0, N).ordinal, N)


def test_a_global_shuffle_is_as_good_as_a_uniform_one():
    correlation, distance = quality_of(1)
    assert abs(correlation) < 0.03
    assert abs(distance - 1) < 0.03


def test_slices_cost_a_little_and_order_costs_everything():
    correlation, distance = quality_of(100)
    assert abs(correlation) < 0.15
    assert 0.85 < distance < 1.1
    assert shuffle_quality(np.arange(N), N).serial_correlation > 0.99
