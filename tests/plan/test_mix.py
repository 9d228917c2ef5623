from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, StateError
from energon.plan.blends.curve import Clock, Curve, Point
from energon.plan.blends.mix import Mix, MixEntry

CLOCK = Clock(lanes=1, batch_size=1)


def entry(node, weight=1.0, **settings):
    return MixEntry(node, None if weight is None else Curve.constant(weight), **settings)


def shares(mix, used=(), start=0, stop=None):
    return mix.shares(start, stop, CLOCK, used)


GROUPED = Mix((entry(Mix((entry(0, 3), entry(1, 1))), 2), entry(2, 2)))


def test_shares_of_a_level_are_divided_below_it():
    assert shares(GROUPED) == (0.375, 0.125, 0.5)
    assert GROUPED.sources == (0, 1, 2)


def test_what_is_used_up_gives_its_share_to_its_siblings_first():
    assert shares(GROUPED, used={0}) == (0, 0.5, 0.5)
    assert shares(GROUPED, used={0, 1}) == (0, 0, 1)
    assert shares(GROUPED, used={2}) == (0.75, 0.25, 0)
    assert shares(GROUPED, used={0, 1, 2}) is None


def test_a_blend_may_be_used_up_with_the_first_of_its_entries():
    group = Mix((entry(0, 3), entry(1, 1)), stop_at_first=True)
    assert shares(Mix((entry(group, 1), entry(2, 1))), used={1}) == (0, 0, 1)
    assert shares(group, used={1}) is None


def test_a_blend_without_weights_at_the_time_is_passed_over():
    late = Curve((Point(0, 0), Point(100, 1)))
    mix = Mix((entry(Mix((MixEntry(0, late), MixEntry(1, late))), 1), entry(2, 1)))
    assert shares(mix, stop=100) == (0, 0, 1)
    assert shares(mix, start=100) == (0.25, 0.25, 0.5)
    assert shares(mix, used={2}, stop=100) is None


def test_the_smallest_limit_on_the_way_holds():
    inner = Mix((entry(0, max_epochs=5), entry(1)))
    mix = Mix((entry(inner, max_epochs=2), entry(2), entry(3, max_epochs=0.5)))
    assert mix.limits == {0: 2, 1: 2, 3: 0.5}


def test_derived_weights_are_powers_of_sizes():
    mix = Mix((entry(0, None), entry(Mix((entry(1), entry(2))), None)), exponent=0.5)
    assert shares(mix.settle([100, 300, 100])) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    tokens = Mix((entry(0, None, size=9e9), entry(1, None, size=1e9)))
    assert shares(tokens.settle([1, 1])) == pytest.approx((0.9, 0.1))
    with pytest.raises(ConfigError, match="not settled"):
        mix.knots(CLOCK)


TREES = st.recursive(
    st.just("leaf"),
    lambda inner: st.lists(
        st.tuples(st.floats(0.01, 9), inner, st.none() | st.floats(0.5, 3)), min_size=1, max_size=3
    ),
    max_leaves=10,
)


def build(tree, numbers):
    entries = tuple(
        entry(next(numbers) if below == "leaf" else build(below, numbers), w, max_epochs=limit)
        for w, below, limit in tree
    )
    return Mix(entries, stop_at_first=len(entries) == 2)


@given(TREES.filter(lambda tree: tree != "leaf"), st.sets(st.integers(0, 9)))
def test_shares_sum_to_1_as_long_as_anything_is_left(tree, used):
    mix = build(tree, iter(range(100)))
    found = shares(mix, used)
    if found is None:
        assert mix.is_used_up(used)
    else:
        assert sum(found) == pytest.approx(1)
        assert all(found[number] == 0 for number in used if number < len(found))


@given(TREES.filter(lambda tree: tree != "leaf"))
def test_json_gives_the_mix_again(tree):
    mix = build(tree, iter(range(100)))
    names = {number: f"source {number}" for number in range(100)}
    saved = json.loads(json.dumps(mix.to_json(names)))
    assert Mix.from_json(saved, {name: i for i, name in names.items()}) == mix
    assert [*Mix.names_in(saved)] == [names[number] for number in mix.sources]


@pytest.mark.parametrize(
    "saved", [{}, {"blend": {"z": {"weight": 1}}}, {"blend": 3}, {"blend": {"a": {}}}, []]
)
def test_damaged_mixes_are_refused(saved):
    with pytest.raises(StateError, match="damaged"):
        Mix.from_json(saved, {"a": 0})
