"""Samples fill packs of equal costs in each step, and none is lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, StateError
from energon.plan.balance import Balance
from energon.plan.fill import PACK_ROWS, Budget, add_packs
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.packs import WINDOW_ROWS, PackedOrder, PackedRows, PlannedPacks
from energon.plan.recipe import PlanRecipe
from tests.plan.test_balance import LEAVES, costs, shapes, triples

CONTEXT = 4096


def lengths(rows):
    """Long-tailed, and a function of the sample alone."""
    return np.minimum(1 + (costs(rows) * 300).astype(np.int64), CONTEXT)[:, None]


def squared(rows):
    return lengths(rows)[:, 0].astype(np.float64) ** 2


def plan_of(lanes, micro_batches, *, batch_size=1, window=8, pool=None, speeds=None, **settings):
    order = PackedOrder(
        squared,
        Balance(cost="bytes", window=window, pool=pool, speeds=speeds),
        batch_size,
        micro_batches,
        seed=5,
        lengths=settings.pop("lengths", lengths),
        budget=settings.pop("budget", Budget((CONTEXT,))),
        rows=settings.pop("rows", 9 * window * batch_size),
        identity={},
    )
    order.check(lanes)
    settings = {"kind": "blend", "leaves": LEAVES, "seed": 5, **settings}
    return PlanRecipe(**settings, balance=order)(lanes)


def packs_of(plan, number, unit=PACK_ROWS):
    """The samples of each pack of a window, by lane and number of the pack."""
    packs = {}
    for lane in range(plan.lanes):
        rows = plan.rows_of_window(lane, number)
        samples = plan.at(lane, rows)
        for pack in np.unique(rows // unit):
            packs[lane, int(pack)] = samples.pick(np.flatnonzero(rows // unit == pack))
    return packs


@given(shapes(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_a_window_has_the_samples_of_its_lanes_in_packs_within_the_context(
    shape, batch_size, window, number, by_speed
):
    lanes, micro_batches, settings = shape
    plan = plan_of(
        lanes,
        micro_batches,
        batch_size=batch_size,
        window=window,
        budget=Budget((CONTEXT,), by_speed=by_speed),
        **settings,
    )
    packs = packs_of(plan, number)
    size = plan.window_rows
    before = [plan.plan.rows(lane, number * size, size) for lane in range(lanes)]
    assert sorted(s for rows in packs.values() for s in triples(rows)) == sorted(
        s for rows in before for s in triples(rows)
    )
    speeds = plan.order.speeds(lanes) if by_speed else np.ones(lanes)
    for (lane, _), rows in packs.items():
        assert lengths(rows).sum() <= CONTEXT * speeds[lane]
    batches = packs_of(plan, number, plan.order.unit_rows)
    for group in range(0, lanes, plan.lanes_of_step):
        own = [{b for lane, b in batches if lane == group + v} for v in range(plan.lanes_of_step)]
        assert all(each == own[0] for each in own)
    of_batch = {(lane, pack * PACK_ROWS // plan.order.unit_rows) for lane, pack in packs}
    assert len(packs) == len(of_batch) * batch_size


@pytest.mark.slow
@given(
    shapes(),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
)
def test_any_cut_of_rows_gives_the_same_rows(shape, window, cuts):
    lanes, micro_batches, settings = shape
    plan = plan_of(lanes, micro_batches, **settings, window=2)
    again = plan_of(lanes, micro_batches, **settings, window=2)
    lane, start = lanes - 1, window * WINDOW_ROWS + 3
    rows = PackedRows(plan, lane, start).numbers(0, sum(cuts))
    whole, at = [], start
    for count in cuts:
        whole += triples(again.rows(lane, at, count))
        if len(whole):
            at = int(rows[len(whole) - 1]) + 1
    assert whole == triples(plan.rows(lane, start, sum(cuts)))
    shuffled = np.random.default_rng(0).permutation(len(rows))
    assert triples(plan.at(lane, rows[shuffled])) == [whole[each] for each in shuffled.tolist()]


@pytest.mark.parametrize(("speeds", "pool"), [((1, 0.5), None), ((1, 1, 1, 0.6), 4)])
def test_packs_of_slower_lanes_cost_less(speeds, pool):
    plan = plan_of(16, 16, window=24, pool=pool, speeds=speeds)
    steps = [plan.costs_of_step(0, step * PACK_ROWS) for step in range(plan.window(0, 0).steps)]
    times = np.array([step.times for step in steps])
    assert times.max(axis=1).sum() / times.mean(axis=1).sum() < 1.25
    loads = np.sum([step.costs for step in steps], axis=0).reshape(-1, len(speeds)).sum(axis=0)
    assert loads / loads.max() == pytest.approx(np.array(speeds), rel=0.15)


@pytest.mark.slow
@given(shapes(), st.integers(1, 3), st.integers(0, 60))
def test_every_sample_of_a_pass_comes_once(shape, batch_size, total):
    lanes, micro_batches, settings = shape
    leaves = (PlanLeaf("a", 40 + total, slice_samples=4),)
    plan = plan_of(
        lanes,
        micro_batches,
        batch_size=batch_size,
        window=2,
        **settings,
        kind="epochized",
        leaves=leaves,
        repeat=False,
    )
    drawn = []
    for lane in range(lanes):
        rows = PackedRows(plan, lane, 0).numbers(0, 10**4)
        samples = triples(plan.rows(lane, 0, 10**4))
        drawn += samples
        for row, sample in zip(rows.tolist(), samples, strict=True):
            assert plan.find(*sample) == (lane, row)
    assert sorted(drawn) == [(0, 0, ordinal) for ordinal in range(40 + total)]


def test_leaves_are_counted_as_they_are_drawn():
    plan = plan_of(6, 6, window=3, pool=3)
    ends = [int(PackedRows(plan, lane, 0).numbers(999, 1)[0]) + 1 for lane in range(6)]
    counts = [np.bincount(plan.rows(lane, 0, 1000).leaf, minlength=2) for lane in range(6)]
    reported = [plan.leaf_counts(lane, ends[lane]) for lane in range(6)]
    assert np.abs(np.sum(counts, 0) - np.sum(reported, 0)).max() <= 6 * plan.window_rows


@pytest.mark.slow
def test_packs_are_full_and_those_of_a_step_cost_the_same():
    leaves = (PlanLeaf("a", 10**6, slice_samples=8),)
    plan = plan_of(32, 32, window=64, rows=64 * 11, leaves=leaves)
    tokens = capacity = slowest = mean = 0.0
    for number in range(4):
        loads = {}
        for (_, pack), rows in packs_of(plan, number).items():
            tokens += float(lengths(rows).sum())
            capacity += CONTEXT
            loads.setdefault(pack, []).append(squared(rows).sum())
        slowest += sum(max(each) for each in loads.values())
        mean += sum(np.mean(each) for each in loads.values())
    assert 1 - tokens / capacity < 0.02
    assert slowest / mean < 1.03


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=60),
    st.integers(1, 2),
    st.integers(1, 6),
)
def test_more_packs_have_the_same_samples_and_none_is_empty(values, dimensions, group):
    sizes = np.array(values)[:, :dimensions]
    budget = Budget((24, 5)[:dimensions])
    bins, count = budget.fill(sizes, key=3)
    assert ((bins < 0) == (sizes > np.array(budget.room)).any(axis=1)).all()
    assert budget.has_room(sizes, bins, count)
    total = -(-count // group) * group
    costs = sizes[:, 0].astype(np.float64)
    more = add_packs(bins, count, total, group=group, lengths=sizes, costs=costs, budget=budget)
    assert ((more < 0) == (bins < 0)).all()
    assert budget.has_room(sizes, more, total)
    packed = more[more >= 0]
    assert len(np.unique(packed)) == min(total, len(packed))
    assert packed.max(initial=-1) < total


def test_the_epochs_of_a_small_dataset_meet_in_few_packs():
    leaves = (PlanLeaf("a", 600, slice_samples=4),)
    plan = plan_of(4, 4, window=64, leaves=leaves)
    packs = packs_of(plan, 0).values()
    repeated = sum(len(rows.ordinal) - len(np.unique(rows.ordinal)) for rows in packs)
    assert repeated < 0.03 * sum(len(rows.ordinal) for rows in packs)


def test_a_run_keeps_its_windows():
    order = plan_of(4, 4).order
    assert order.continuing({"micro_batches": 8, "window_rows": 99}).rows == 99
    for rows in (0, "many", True):
        with pytest.raises(StateError, match="damaged"):
            order.continuing({"window_rows": rows})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": "tokens", "context": 0}, "whole numbers from 1"),
        ({"length": ["a", "b"], "context": 10}, "as many lengths"),
        ({"length": lambda measures: measures["bytes"], "context": 10}, "named functions"),
        ({"length": "tokens", "context": 10, "too_long": "cut"}, "'error' or 'leave_out'"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PlannedPacks(**settings)
