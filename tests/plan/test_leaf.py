from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.leaves.leaf import PlanLeaf, choose_slice_samples
from energon.plan.recipe import PlanRecipe

PARALLEL, COPIES = st.sampled_from([1, 3, 16]), st.sampled_from([1, 1, 3])
block_lists = st.lists(st.integers(1, 60), min_size=1, max_size=25)


def leaf_of(blocks, uid="leaf", **about):
    about.setdefault("slice_samples", int(np.median(blocks)))
    return PlanLeaf(uid, sum(blocks), blocks=tuple(blocks), **about)


leaves = st.builds(
    PlanLeaf,
    uid=st.just("leaf"),
    num_samples=st.integers(1, 700),
    slice_samples=st.sampled_from([1, 2, 7, 30, 128]),
    parallel_slices=PARALLEL,
    shuffle_over_epochs=COPIES,
) | st.builds(leaf_of, block_lists, parallel_slices=PARALLEL, shuffle_over_epochs=COPIES)


def draws_by_epoch(plan, num_draws):
    """All draws of all lanes below `num_draws`, as epoch -> list of ordinals."""
    found = {}
    for lane in range(plan.lanes):
        rows = plan.rows(lane, 0, len(range(lane, num_draws, plan.lanes)))
        for epoch, ordinal in zip(rows.epoch.tolist(), rows.ordinal.tolist(), strict=True):
            found.setdefault(epoch, []).append(ordinal)
    return found


@given(leaf=leaves, lanes=st.integers(1, 40), seed=st.integers(0, 9))
@settings(max_examples=120, deadline=None)
def test_every_epoch_has_every_sample_once_over_all_lanes(leaf, lanes, seed):
    """Those that are shuffled together have it as often as they are many."""
    number, copies = leaf.num_samples, leaf.shuffle_over_epochs
    found = draws_by_epoch(PlanRecipe("blend", (leaf,), seed)(lanes), 3 * number * copies)
    assert set(found) == set(range(3 * copies))
    for first in range(0, 3 * copies, copies):
        drawn = [ordinal for epoch in range(copies) for ordinal in found[first + epoch]]
        assert sorted(drawn) == sorted([*range(number)] * copies)


def test_with_replacement_some_samples_come_again_and_some_not_at_all():
    leaf = PlanLeaf("leaf", 1000, shuffle_over_epochs=-1)
    ordinals = PlanRecipe("blend", (leaf,), 0)(1).rows(0, 0, 1000).ordinal
    assert 580 < len(set(ordinals.tolist())) < 690  # 1 - 1/e of them


def test_without_shuffling_samples_are_dealt_in_order():
    leaf = PlanLeaf("leaf", 10, slice_samples=2, shuffle_over_epochs=None)
    plan = PlanRecipe("blend", (leaf,), 0)(2)
    assert plan.rows(0, 0, 6).ordinal.tolist() == [0, 1, 4, 5, 8, 9]
    assert plan.rows(1, 0, 6).ordinal.tolist() == [2, 3, 6, 7, 0, 1]


def test_a_lane_reads_whole_slices_and_has_at_most_s_of_them_open():
    length, parallel = 20, 4
    leaf = PlanLeaf("leaf", 100_000, slice_samples=length, parallel_slices=parallel)
    ordinals = PlanRecipe("blend", (leaf,), 1)(8).rows(3, 0, 40 * length * parallel).ordinal
    for window in ordinals.reshape(-1, length * parallel):
        neighbours = np.diff(np.sort(window)) == 1
        assert neighbours.sum() >= (length - 1) * parallel - 1  # one slice may wrap around
    assert (np.diff(ordinals) == 1).mean() < 0.1


def test_leaves_with_the_same_samples_are_drawn_independently():
    twins = [PlanLeaf("a", 10_000, slice_samples=10), PlanLeaf("b", 10_000, slice_samples=10)]
    rows = PlanRecipe("blend", tuple(twins), 0)(1).rows(0, 0, 4000)
    first, second = (rows.ordinal[rows.leaf == leaf][:1900] for leaf in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert len(set(first.tolist()) & set(second.tolist())) < 700  # about 360 by chance


def test_epochs_are_shuffled_differently():
    plan = PlanRecipe("blend", (PlanLeaf("leaf", 500, slice_samples=8),), 0)(1)
    assert plan.rows(0, 0, 500).ordinal.tolist() != plan.rows(0, 500, 500).ordinal.tolist()


def test_a_small_leaf_is_cut_finer_so_that_it_still_mixes():
    ordinals = PlanRecipe("blend", (PlanLeaf("leaf", 400, slice_samples=128),), 0)(4).rows(
        0, 0, 100
    )
    assert (np.diff(ordinals.ordinal) == 1).mean() < 0.2


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_samples": 0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"repetitions": 0.0},
        {"slice_samples": 0},
        {"parallel_slices": 0},
        {"shuffle_over_epochs": 0},
    ],
)
def test_refuses_numbers_that_make_no_sense(wrong):
    with pytest.raises(ConfigError, match="leaf"):
        PlanLeaf(**{"uid": "leaf", "num_samples": 5, **wrong})


def test_slices_are_shorter_for_larger_samples():
    assert [choose_slice_samples(size) for size in (300, 70_000, 8_000_000)] == [128, 59, 1]


@pytest.mark.parametrize("much", [{"repetitions": 1e15}, {"shuffle_over_epochs": 10**15}])
def test_more_rows_than_can_be_counted_are_refused(much):
    with pytest.raises(ConfigError, match="more than the 9,007,199,254,740,992 that can be count"):
        PlanLeaf("leaf", 20, **much)
    assert PlanLeaf("leaf", 1, **much).num_samples == 1
