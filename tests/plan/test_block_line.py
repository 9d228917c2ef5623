"""Slices follow blocks that are decoded as a whole, such as the row groups of Parquet files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.leaves import leaf_order
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.leaves.leaf_order import Era, LeafOrder
from energon.plan.randomness import shuffle_quality
from energon.plan.recipe import PlanRecipe
from tests.plan.test_leaf import block_lists, leaf_of


def blocks_opened(plan, blocks, rows):
    """Return how often a lane begins to read a block, summed over lanes, if it keeps it open."""
    edges = np.cumsum([0, *blocks])
    return sum(
        len(set((np.searchsorted(edges, plan.rows(lane, 0, count).ordinal, side="right")).tolist()))
        for lane, count in enumerate(rows)
    )


@given(blocks=block_lists, start=st.integers(0, 10**7), cut=st.integers(0, 90))
@settings(max_examples=50, deadline=None)
def test_rows_do_not_depend_on_where_reading_begins(blocks, start, cut):
    leaves = [leaf_of(blocks), PlanLeaf("other", 77, slice_samples=5), leaf_of(blocks[:1], "third")]
    plan = PlanRecipe("blend", tuple(leaves), 2)(3)
    whole = plan.rows(1, start, 90)
    first, second = plan.rows(1, start, cut), plan.rows(1, start + cut, 90 - cut)
    for name in ("leaf", "epoch", "ordinal"):
        parts = np.concatenate([getattr(first, name), getattr(second, name)])
        assert parts.tolist() == getattr(whole, name).tolist()


@given(
    blocks=st.lists(st.integers(5, 60), min_size=40, max_size=90),
    lanes=st.integers(1, 8),
    seed=st.integers(0, 5),
)
@settings(max_examples=50, deadline=None)
def test_a_block_is_read_by_one_lane_but_where_two_meet(blocks, lanes, seed):
    leaf = leaf_of(blocks, parallel_slices=4)
    n = leaf.num_samples
    plan = PlanRecipe("blend", (leaf,), seed)(lanes)
    opened = blocks_opened(plan, blocks, [len(range(lane, n, lanes)) for lane in range(lanes)])
    assert len(blocks) <= opened <= len(blocks) + lanes - 1


@given(blocks=st.lists(st.integers(5, 60), min_size=1, max_size=60), lanes=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_at_most_the_blocks_of_a_window_and_of_its_edges_are_open(blocks, lanes):
    parallel = 3
    leaf = leaf_of(blocks, slice_samples=min(blocks), parallel_slices=parallel)
    ordinals = PlanRecipe("blend", (leaf,), 3)(lanes).rows(0, 0, leaf.num_samples // lanes).ordinal
    number = np.searchsorted(np.cumsum([0, *blocks]), ordinals, side="right")
    first = {int(block): int(np.flatnonzero(number == block)[0]) for block in number}
    last = {int(block): int(np.flatnonzero(number == block)[-1]) for block in number}
    for row in range(len(ordinals)):
        assert sum(first[block] <= row <= last[block] for block in first) <= parallel + 1


def test_lanes_with_few_blocks_mix_pieces_of_many():
    leaf = leaf_of([100] * 8, parallel_slices=16)
    for lane in range(4):
        ordinals = PlanRecipe("blend", (leaf,), 0)(4).rows(lane, 0, 200).ordinal
        assert len(set((ordinals // 50).tolist())) >= 4
        assert shuffle_quality(ordinals, 800).serial_correlation < 0.3


def test_epochs_are_shuffled_differently():
    plan = PlanRecipe("blend", (leaf_of([10] * 30, parallel_slices=2),), 0)(2)
    first, second = plan.rows(0, 0, 150).ordinal, plan.rows(0, 150, 150).ordinal
    assert first.tolist() != second.tolist()
    assert set((first // 10).tolist()) != set((second // 10).tolist())


def test_slices_drawn_with_replacement_stay_within_their_blocks():
    blocks = [30, 10, 50, 20]
    leaf = leaf_of(blocks, slice_samples=8, parallel_slices=1, shuffle_over_epochs=-1)
    ordinals = PlanRecipe("blend", (leaf,), 0)(1).rows(0, 0, 80_000).ordinal
    number = np.searchsorted(np.cumsum([0, *blocks]), ordinals, side="right").reshape(-1, 8)
    assert (number == number[:, :1]).all()
    assert np.bincount(ordinals, minlength=110).min() > 500  # 727 on average


@pytest.mark.parametrize("repetitions", [1.0, 2.0, 1.5])
def test_a_line_of_leaves_follows_the_blocks_of_those_that_have_some(repetitions):
    blocks = [50, 50, 17] * 10
    leaves = [
        leaf_of(blocks, repetitions=repetitions, parallel_slices=3),
        PlanLeaf("tar", 200, slice_samples=4),
    ]
    plan = PlanRecipe("epochized", tuple(leaves), 0, repeat=False)(2)
    rows = [plan.rows(lane, 0, 10_000) for lane in range(2)]
    ordinals = np.concatenate([each.ordinal[each.leaf == 0] for each in rows])
    counts = np.bincount(ordinals, minlength=sum(blocks))
    assert counts.sum() == sum(blocks) * repetitions
    assert set(counts.tolist()) <= {int(repetitions), int(np.ceil(repetitions))}
    assert sorted(np.concatenate([e.ordinal[e.leaf == 1] for e in rows])) == [*range(200)]
    edges = np.cumsum([0, *blocks])
    if repetitions == 1:
        opened = [
            set(np.searchsorted(edges, each.ordinal[each.leaf == 0], side="right").tolist())
            for each in rows
        ]
        assert sum(map(len, opened)) <= len(blocks) + 1


def test_an_epoch_that_had_begun_keeps_its_order_with_other_lanes():
    leaf = leaf_of([9, 5, 12] * 20, parallel_slices=2)
    n = leaf.num_samples
    before = PlanRecipe("blend", (leaf,), 0)(3)
    taken = [before.rows(lane, 0, 40).ordinal for lane in range(3)]
    order = LeafOrder([leaf], lanes=4, seed=0, eras=[Era((120,), 3)])
    leaf, draws = np.zeros(200, np.int32), np.arange(200)
    rest = [order.at(leaf, order.numbers(lane, leaf, draws)) for lane in range(4)]
    epochs = np.concatenate([epoch for epoch, _ in rest])
    ordinals = np.concatenate([ordinal for _, ordinal in rest])
    first_epoch = np.concatenate([*taken, ordinals[epochs == 0]])
    assert sorted(first_epoch.tolist()) == list(range(n))


def test_too_many_blocks_are_not_followed(monkeypatch):
    monkeypatch.setattr(leaf_order, "MAX_BLOCKS", 20)
    leaf = leaf_of([10] * 30, parallel_slices=2)
    plain = PlanLeaf("leaf", 300, slice_samples=10, parallel_slices=2)
    rows = [PlanRecipe("blend", (each,), 0)(2).rows(1, 0, 300).ordinal for each in (leaf, plain)]
    assert rows[0].tolist() == rows[1].tolist()


@pytest.mark.parametrize("blocks", [(3, 4), (), (5, 0)])
def test_refuses_blocks_that_do_not_add_up(blocks):
    with pytest.raises(ConfigError, match="blocks"):
        PlanLeaf("leaf", 5, blocks=blocks)
