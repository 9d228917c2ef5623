from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.blends.curve import RAMP_STEPS, Clock, Curve, Point

CLOCK = Clock(lanes=4, batch_size=8)


def test_a_number_is_a_curve():
    curve = Curve.constant(3)
    assert curve.is_constant
    assert [*curve.knots(CLOCK)] == []
    assert curve.mean(10**12, None, CLOCK) == 3


@pytest.mark.parametrize(("unit", "row"), [("rows", 1000), ("samples", 250), ("batches", 2000)])
def test_positions_are_rows_of_all_lanes_together(unit, row):
    curve = Curve((Point(0, 1), Point(1000, 2)), unit)
    assert [*curve.knots(CLOCK)] == [row]
    assert curve.mean(0, row, CLOCK) == 1
    assert curve.mean(row, None, CLOCK) == 2


def test_positions_between_rows_are_rounded_up():
    assert CLOCK.row(9, "samples") == 3
    assert CLOCK.row(9, "batches") == 24


@given(
    start=st.integers(0, 1000),
    length=st.integers(1, 10**6),
    values=st.tuples(st.floats(0, 100), st.floats(0, 100)),
)
def test_the_steps_of_a_ramp_have_its_area(start, length, values):
    low, high = values
    points = [Point(0, low)] + ([Point(start, low)] if start else [])
    curve = Curve((*points, Point(start + length, high, ramp=True)), "rows")
    knots = sorted({start, start + length, *curve.knots(CLOCK)})
    assert len(knots) <= RAMP_STEPS + 2
    area = sum(
        (b - a) * curve.mean(a, b, CLOCK) for a, b in itertools.pairwise(knots) if a >= start
    )
    assert area == pytest.approx(length * (low + high) / 2, rel=1e-6, abs=1e-6)
    assert curve.mean(start + length, None, CLOCK) == high


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 9), st.booleans()), max_size=5),
    st.sampled_from(["samples", "batches", "rows"]),
)
def test_json_gives_the_curve_again(steps, unit):
    positions = itertools.accumulate(step for step, _, _ in steps)
    points = (Point(p, v, r) for p, (_, v, r) in zip(positions, steps, strict=True))
    curve = Curve((Point(0, 1.0), *points), unit)
    again = Curve.from_json(curve.to_json())
    for row in (0, 1, 10**5, 10**7):
        assert again.mean(row, row + 1, CLOCK) == curve.mean(row, row + 1, CLOCK)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "starts at 0"),
        ([Point(5, 1)], "starts at 0"),
        ([Point(0, 1), Point(7, 1), Point(7, 2)], "ascends"),
        ([Point(0, 1, ramp=True)], "cannot start with a ramp"),
        ([Point(0, -1)], "a number of 0 or more"),
        ([Point(0, float("nan"))], "a number of 0 or more"),
    ],
)
def test_refuses_what_is_no_schedule(points, message):
    with pytest.raises(ConfigError, match=message):
        Curve(tuple(points))
