"""Samples of steps are dealt to micro-batches of equal costs, and none is lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, StateError
from energon.plan.balance import Balance, BalancedOrder, BalancedPlan
from energon.plan.deal import deal, deal_to_lanes, samples_by_speed
from energon.plan.dealt import rows_of_lanes
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe

LEAVES = (
    PlanLeaf("a", 700, weight=3, slice_samples=8),
    PlanLeaf("b", 90, weight=1, slice_samples=4),
)


def costs(rows):
    """Long-tailed, and a function of the sample alone."""
    numbers = rows.leaf.astype(np.int64) * 1000 + rows.ordinal
    uniform = ((numbers * 2654435761) % 10007 + 0.5) / 10007
    return np.where(rows.leaf < 0, 0.0, (-np.log(uniform)) ** 1.5)


def plans(lanes, micro_batches, *, batch_size=3, window="step", pool=None, speeds=None, **settings):
    """The plan without balancing, and the balanced one."""
    balance = Balance(cost="bytes", window=window, pool=pool, speeds=speeds)
    order = BalancedOrder(costs, balance, batch_size, micro_batches, seed=5)
    order.check(lanes)
    settings = {"kind": "blend", "leaves": LEAVES, "seed": 5, **settings}
    recipe = PlanRecipe(**settings, stripe=batch_size, batch_size=batch_size)
    balanced = PlanRecipe(**settings, stripe=batch_size, batch_size=batch_size, balance=order)
    return recipe(lanes), balanced(lanes)


def triples(rows):
    return list(zip(*(column.tolist() for column in rows), strict=True))


def step(plan, number, micro_batches, batch_size=3):
    """The micro-batches of a step: consecutive global batches."""
    batches = []
    for batch in range(number * micro_batches, (number + 1) * micro_batches):
        turn, lane = divmod(batch, plan.lanes)
        batches.append(plan.rows(lane, turn * batch_size, batch_size))
    return batches


def flat(batches):
    return sorted(sample for rows in batches for sample in triples(rows))


def loads_of(plan, steps, batch_size):
    """The costs of the micro-batches of steps, of which each lane has one, shape (lanes, steps)."""
    rows = [plan.rows(lane, 0, steps * batch_size) for lane in range(plan.lanes)]
    return np.array([costs(each).reshape(steps, batch_size).sum(axis=1) for each in rows])


def slowest(plan, steps, batch_size, speeds=(1,)):
    """The time of steps of a micro-batch a lane, over that if none waited for another."""
    loads = loads_of(plan, steps, batch_size) / np.resize(speeds, plan.lanes)[:, None]
    return loads.max(axis=0).sum() / loads.mean(axis=0).sum()


SPEEDS = [(1,), (1,), (1, 0.5), (0.2, 1, 1), (3, 1, 2, 2)]


@st.composite
def shapes(draw):
    """Numbers of lanes and micro-batches that fit, with a pool, streams and speeds."""
    of_step, times = draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 3))
    lanes, micro_batches = draw(
        st.sampled_from([(of_step * times, of_step), (of_step, of_step * times)])
    )
    speeds = draw(st.sampled_from([each for each in SPEEDS if of_step % len(each) == 0]))
    pools = (m for m in (1, 2, 3, 6) if of_step % m == 0 and m % len(speeds) == 0)
    pool, streams = draw(st.sampled_from([None, *pools])), draw(st.sampled_from([None, 1, 2]))
    return lanes, micro_batches, {"pool": pool, "streams": streams, "speeds": speeds}


@given(shapes(), st.integers(1, 5), st.integers(0, 10**9))
def test_a_window_has_the_samples_of_the_lanes_of_its_pool(shape, window, number):
    lanes, micro_batches, settings = shape
    before, plan = plans(lanes, micro_batches, window=window, **settings)
    assert isinstance(plan, BalancedPlan)
    size = plan.window_rows
    for members in map(plan.lanes_of_pool, range(lanes // plan.pool)):
        exchanged = [plan.rows(lane, number * size, size) for lane in members]
        assert flat(exchanged) == flat([before.rows(lane, number * size, size) for lane in members])


@given(shapes(), st.integers(0, 10**9))
def test_a_step_keeps_its_samples_and_all_of_them(shape, number):
    lanes, micro_batches, settings = shape
    before, plan = plans(lanes, micro_batches, **settings)
    assert flat(step(plan, number, micro_batches)) == flat(step(before, number, micro_batches))


@pytest.mark.slow
@given(
    shapes(),
    st.sampled_from(["step", 1, 2, 5]),
    st.integers(0, 10**12),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_any_cut_of_rows_gives_the_same_rows(shape, window, start, lengths):
    lanes, micro_batches, settings = shape
    _, plan = plans(lanes, micro_batches, window=window, **settings)
    _, again = plans(lanes, micro_batches, window=window, **settings)
    lane, whole, at = lanes - 1, [], start
    for length in lengths:
        whole += triples(again.rows(lane, at, length))
        at += length
    assert whole == triples(plan.rows(lane, start, sum(lengths)))
    shuffled = np.random.default_rng(0).permutation(np.arange(start, at))
    picked = triples(plan.at(lane, shuffled))
    assert picked == [whole[row - start] for row in shuffled.tolist()]


@pytest.mark.slow
@given(shapes(), st.sampled_from(["step", 3]), st.integers(0, 60))
def test_every_sample_of_a_pass_comes_once_up_to_the_end_of_all_lanes(shape, window, total):
    lanes, micro_batches, settings = shape
    leaves = (PlanLeaf("a", 40 + total, slice_samples=4),)
    _, plan = plans(
        lanes,
        micro_batches,
        window=window,
        **settings,
        kind="epochized",
        leaves=leaves,
        repeat=False,
    )
    drawn = [sample for lane in range(lanes) for sample in triples(plan.rows(lane, 0, 10**4))]
    assert sorted(drawn) == [(0, 0, ordinal) for ordinal in range(40 + total)]
    for lane in range(lanes):
        for row, sample in enumerate(triples(plan.rows(lane, 0, 10**4))):
            assert plan.find(*sample) == (lane, row)


@given(
    st.sampled_from([None, 1, 2, 6]),
    st.sampled_from([{}, {"shuffle_window": 20}, {"kind": "epochized", "repeat": False}]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 900), st.integers(0, 40)), max_size=8),
)
def test_rows_of_several_lanes_are_those_of_each(streams, settings, requests):
    before, _ = plans(6, 6, streams=streams, **settings)
    rows, edges = rows_of_lanes(before, requests)
    together = triples(rows)
    for (lane, start, count), begin, stop in zip(requests, edges[:-1], edges[1:], strict=True):
        assert together[begin:stop] == triples(before.rows(lane, start, count))


def test_leaves_are_counted_as_they_are_drawn():
    _, plan = plans(6, 6, window=3, pool=3)
    rows = 1000
    counts = [np.bincount(plan.leaf_of(lane, np.arange(rows)), minlength=2) for lane in range(6)]
    reported = [plan.leaf_counts(lane, rows) for lane in range(6)]
    assert np.abs(np.sum(counts, 0) - np.sum(reported, 0)).max() <= plan.window_rows


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 8))
def test_a_deal_gives_each_sample_once_and_all_hands_the_same_number(values, hands):
    values = np.array(values[: len(values) // hands * hands])
    dealt = deal(values, hands)
    assert {len(samples) for samples in dealt} == {len(values) // hands}
    assert sorted(sample for samples in dealt for sample in samples) == list(range(len(values)))


def test_a_deal_is_as_even_as_the_largest_sample_admits():
    rng = np.random.default_rng(1)
    values = rng.lognormal(0, 0.5, 64 * 16)
    loads = [values[samples].sum() for samples in deal(values, 64)]
    assert max(loads) / np.mean(loads) < 1.03


@given(
    st.lists(st.integers(-(10**9), 10**12), min_size=12, max_size=96),
    st.sampled_from([(1, 1), (2, 2), (3, 6), (6, 12), (1, 4)]),
    st.integers(0, 100),
    st.integers(0, 10**10),
)
def test_lanes_get_equally_many_samples_with_costs_as_even_as_in_a_deal(values, shape, seed, slack):
    lanes, hands = shape
    costs = np.array(values[: len(values) // hands * hands])
    homes = np.sort(np.random.default_rng(seed).integers(0, lanes, len(costs)))
    dealt = deal_to_lanes(costs, homes, lanes, hands, slack=slack)
    assert dealt.shape == (lanes, hands // lanes, len(costs) // hands)
    assert sorted(dealt.ravel().tolist()) == list(range(len(costs)))
    most, greedy = (int(costs[each].sum(axis=-1).max()) for each in (dealt, deal(costs, hands)))
    assert most <= greedy + slack


@pytest.mark.parametrize(("batch_size", "sigma", "moves"), [(4, 1.5, 0.05), (16, 1, 0.25)])
def test_a_step_is_nearly_as_even_as_the_best_deal_and_moves_few_samples(batch_size, sigma, moves):
    rng = np.random.default_rng(2)
    homes = np.repeat(np.arange(64), batch_size)
    costs = (rng.lognormal(0, sigma, len(homes)) * 1e6).astype(np.int64)
    slack = int(costs.sum() * 0.01) // 64
    dealt = deal_to_lanes(costs, homes, 64, 64, slack=slack)[:, 0]
    most, greedy = (costs[each].sum(axis=1).max() for each in (dealt, deal(costs, 64)))
    assert most <= 1.02 * greedy
    assert (homes[dealt] != np.arange(64)[:, None]).mean() < moves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "pool", "most"), [("step", None, 3.0), (16, None, 1.2), (16, 8, 1.3), (64, 1, 1.5)]
)
def test_larger_windows_and_pools_make_steps_more_even(window, pool, most):
    before, plan = plans(32, 32, batch_size=4, window=window, pool=pool)
    assert slowest(plan, 64, 4) < most < slowest(before, 64, 4)


@pytest.mark.parametrize("speeds", [(1, 0.5), (0.6, 1, 1, 0.3)])
@pytest.mark.parametrize(
    ("window", "pool", "most"), [("step", None, 1.2), (8, None, 1.1), (8, 4, 1.25)]
)
def test_costs_are_in_proportion_to_the_speeds_of_lanes(speeds, window, pool, most):
    _, plan = plans(16, 16, batch_size=16, window=window, pool=pool, speeds=speeds)
    _, equal = plans(16, 16, batch_size=16, window=window, pool=pool)
    assert slowest(plan, 16, 16, speeds) < most < slowest(equal, 16, 16, speeds)
    loads = loads_of(plan, 16, 16).sum(axis=1).reshape(-1, len(speeds)).sum(axis=0)
    assert loads / loads.sum() == pytest.approx(np.array(speeds) / sum(speeds), rel=0.1)


@given(st.lists(st.integers(0, 10**9), min_size=12, max_size=60), st.sampled_from(SPEEDS[2:]))
def test_samples_for_slower_lanes_are_a_division_with_equal_counts(values, speeds):
    lanes = 2 * len(speeds)
    costs = np.array(values[: len(values) // lanes * lanes])
    groups = samples_by_speed(costs, lanes, np.resize(speeds, lanes) / max(speeds))
    assert sorted(np.concatenate([samples for _, samples in groups]).tolist()) == [
        *range(len(costs))
    ]
    assert all(len(samples) * lanes == len(costs) * len(own) for own, samples in groups)


def test_a_step_of_a_plan_tells_its_costs_and_times():
    _, plan = plans(8, 16, window=2, speeds=(1, 0.5))
    for row in range(0, 24, 3):
        found = plan.costs_of_step(3, row)
        number, turn = divmod(row // 3, 2)
        of_step = [costs(rows).sum() for rows in step(plan, number, 16)]
        assert found.costs == pytest.approx(of_step)
        assert found.own == turn * 8 + 3
        assert found.times == pytest.approx(found.costs / np.resize([1, 0.5], 16))


@pytest.mark.parametrize(
    ("speeds", "relative"),
    [
        ((2, 2), None),
        ([5], None),
        ((4, 2, 4, 2), (1.0, 0.5)),
        (np.array([1, 2, 2]), (0.5, 1.0, 1.0)),
    ],
)
def test_speeds_are_relative_and_equal_ones_are_none(speeds, relative):
    assert Balance(cost="bytes", speeds=speeds).speeds == relative


def test_the_largest_samples_do_not_always_go_to_the_same_lane():
    _, plan = plans(8, 8)
    heaviest = [
        int(np.argmax([costs(rows).max() for rows in step(plan, number, 8)]))
        for number in range(64)
    ]
    assert len(set(heaviest)) == 8


@pytest.mark.parametrize(
    ("lanes", "micro_batches", "pool", "message"),
    [
        (8, 6, None, "lanes=6 or 12"),
        (4, 6, None, "lanes=6"),
        (12, 6, 4, "one of 1, 2, 3, 6"),
        (8, 8, 1, "pools of 1 with all speeds.*one of 2, 4, 8"),
        (3, 6, None, "3 lanes, which 2 speeds do not fit"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(
    lanes, micro_batches, pool, message
):
    with pytest.raises(ConfigError, match=message):
        plans(lanes, micro_batches, pool=pool, speeds=(1, 0.5) if "speeds" in message else None)


def test_a_run_keeps_its_micro_batches():
    order = BalancedOrder(costs, Balance(cost="bytes"), 3, 4)
    assert order.continuing({"micro_batches": 8}).micro_batches == 8
    given = BalancedOrder(costs, Balance(cost="bytes", micro_batches=4), 3, 4)
    with pytest.raises(StateError, match="steps of 8 micro-batches, now it is 4"):
        given.continuing({"micro_batches": 8})
    with pytest.raises(StateError, match="damaged"):
        order.continuing({"micro_batches": "many"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cost": 3}, "expected the name of a measure"),
        ({"cost": lambda measures: measures["bytes"]}, "has no name"),
        ({"cost": "bytes", "window": 0}, "from 1"),
        ({"cost": "bytes", "pool": 1.5}, "from 1"),
        ({"cost": "bytes", "micro_batches": -1}, "from 1"),
        ({"cost": "bytes", "skipped": "fill"}, "'shorten' or 'repeat'"),
        *(
            ({"cost": "bytes", "speeds": speeds}, "expected positive numbers, one for each rank")
            for speeds in [(), (1, 0), 2, ("fast",), (1, float("nan"))]
        ),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Balance(**settings)
