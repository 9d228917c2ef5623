from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.blends.blend import _find_next
from energon.plan.blends.curve import Curve, Point
from energon.plan.blends.mix import Mix, MixEntry, apportion
from energon.plan.leaves.leaf import PlanLeaf
from energon.plan.recipe import PlanRecipe


def leaves(sizes):
    return [PlanLeaf(f"leaf {i}", n, slice_samples=4) for i, n in enumerate(sizes)]


def scheduled(sizes, schedule, *, lanes, seed, shuffle_window=0):
    """Return a plan whose weights change at rows of a lane."""
    curves = (
        Curve(tuple(Point(row, weights[number]) for row, weights in schedule), "rows")
        for number in range(len(sizes))
    )
    mix = Mix(tuple(itertools.starmap(MixEntry, enumerate(curves))))
    recipe = PlanRecipe("blend", tuple(leaves(sizes)), seed, mix=mix, shuffle_window=shuffle_window)
    return recipe(lanes)


weights = st.lists(st.floats(0.01, 10), min_size=3, max_size=3)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    stages=st.lists(st.tuples(st.integers(1, 300), weights), max_size=6),
    first=weights,
    lanes=st.sampled_from([1, 2, 8, 64]),
)
@settings(max_examples=60, deadline=None)
def test_epochs_stay_exact_through_any_changes_of_weights(sizes, stages, first, lanes):
    rows = np.cumsum([step for step, _ in stages]).tolist()
    schedule = [(0, first), *((row, w) for row, (_, w) in zip(rows, stages, strict=True))]
    plan = scheduled(sizes, schedule, lanes=lanes, seed=3)
    seen = [set() for _ in sizes]
    last = [[-1] * lanes for _ in sizes]
    for lane in range(lanes):
        leaf, draws = plan.draws(lane, np.arange(2000))
        for number in range(len(sizes)):
            mine = draws[leaf == number]
            # A lane draws from a leaf without a gap and without a repetition.
            assert mine.tolist() == list(range(len(mine)))
            last[number][lane] = len(mine)
            seen[number].update((mine * lanes + lane).tolist())
    for number, n in enumerate(sizes):
        complete = min(last[number]) * lanes // n
        assert set(range(complete * n)) <= seen[number]


@pytest.mark.slow
@given(
    cuts=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    start=st.sampled_from([0, 777, 10**12]),
    window=st.sampled_from([0, 100]),
)
@settings(max_examples=40, deadline=None)
def test_any_cuts_give_the_same_rows(cuts, start, window):
    schedule = [(0, [1, 2, 3]), (800, [3, 0, 1])]
    plan = scheduled([50, 1000, 7], schedule, lanes=4, seed=1, shuffle_window=window)
    edges = sorted({0, 3000, *cuts})
    whole = plan.rows(2, start, 3000)
    for column, name in enumerate(whole._fields):
        parts = [plan.rows(2, start + a, b - a)[column] for a, b in itertools.pairwise(edges)]
        assert np.array_equal(np.concatenate(parts), whole[column]), name


@given(w=st.lists(st.floats(0.05, 20), min_size=2, max_size=30), lane=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_shares_are_nearly_exact_in_every_interval(w, lane):
    plan = PlanRecipe(
        "blend", tuple(PlanLeaf(str(i), 10**6, weight=weight) for i, weight in enumerate(w)), 0
    )(8)
    leaf = plan.rows(lane, 0, 20_000).leaf
    for start, count in ((0, 1000), (7_777, 500), (0, 20_000)):
        got = np.bincount(leaf[start : start + count], minlength=len(w))
        wanted = np.array(w) / sum(w) * count
        # One more or less at either end, and what the places of others are off.
        assert np.abs(got - wanted).max() <= 3 + count / 2000


def test_a_leaf_with_weight_zero_is_never_drawn():
    plan = PlanRecipe(
        "blend", (PlanLeaf("a", 10), PlanLeaf("b", 10, weight=0), PlanLeaf("c", 10)), 0
    )(2)
    assert set(plan.rows(0, 0, 10_000).leaf.tolist()) == {0, 2}


def test_lanes_take_turns_differently():
    plan = PlanRecipe("blend", tuple(leaves([100, 100])), 0)(8)
    patterns = {tuple(plan.rows(lane, 0, 64).leaf.tolist()) for lane in range(8)}
    assert len(patterns) == 8


def test_plans_stay_small_when_they_are_pickled():
    plan = PlanRecipe("blend", tuple(leaves([10**12, 10**9])), 0)(4096)
    rows = plan.rows(4095, 10**12, 5)
    again = pickle.loads(pickle.dumps(plan))
    assert len(pickle.dumps(plan)) < 1000
    assert np.array_equal(again.rows(4095, 10**12, 5).ordinal, rows.ordinal)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50).filter(any))
def test_apportioned_counts_add_up_and_starve_nobody(w):
    counts = apportion(w, 4096)
    assert counts.sum() == 4096
    assert ((counts > 0) == (np.array(w) / max(w) > 0)).all()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "starts at 0"),
        ([(5, [1, 1])], "starts at 0"),
        ([(0, [1, 1]), (9, [1, 1]), (9, [1, 2])], "ascends"),
        ([(0, [1, -1])], "a number of 0 or more"),
    ],
)
def test_refuses_schedules_that_make_no_sense(schedule, message):
    with pytest.raises(ConfigError, match=message):
        scheduled([5, 5], schedule, lanes=1, seed=0)


def test_refuses_leaves_that_would_share_their_draws():
    with pytest.raises(ConfigError, match="share the uid 'a'"):
        PlanRecipe("blend", (PlanLeaf("a", 5), PlanLeaf("a", 6)), 0)(1)


def test_a_fork_finds_stages_although_a_thread_was_finding_some():
    begun = threading.Event()

    def slow():
        begun.set()
        time.sleep(0.1)
        yield from ()

    thread = threading.Thread(target=_find_next, args=([], slow()))
    thread.start()
    begun.wait()
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)  # ends a child that waits
        os._exit(_find_next([], iter(())))
    assert os.waitpid(pid, 0)[1] == 0
    thread.join()
