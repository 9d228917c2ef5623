from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.plan.leaves.subset import resolve_range


@pytest.mark.parametrize(
    ("subsets", "expected"),
    [
        ([], (0, 1000)),
        ([(100, 500)], (100, 500)),
        ([(100, "end")], (100, 1000)),
        ([("50%", "100%")], (500, 1000)),
        ([("50%", "end")], (500, 1000)),
        ([(100, 500), ("50%", "100%")], (300, 500)),
        ([("0%", "50%"), ("50%", "100%")], (250, 500)),
        ([("33.3%", "66.6%")], (333, 666)),
    ],
)
def test_ranges_narrow_one_another(subsets, expected):
    assert resolve_range(1000, subsets) == expected


@given(st.integers(1, 10**6), st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_percentages_that_follow_one_another_leave_nothing_out(n, cuts):
    edges = ["0%", *(f"{cut}%" for cut in sorted(cuts)), "100%"]
    ranges = [resolve_range(n, [pair]) for pair in itertools.pairwise(edges)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("subsets", "message"),
    [
        ([(0, 2000)], "does not lie within"),
        ([(10, 5)], "does not lie within"),
        ([("50%", 10)], "mixes"),
        ([("50", "60%")], "percentage"),
        ([("60%", "50%")], "not a range"),
        ([("0%", "200%")], "not a range"),
        ([(0, 10), (1, 5)], "both absolute"),
    ],
)
def test_refuses_ranges_that_make_no_sense(subsets, message):
    with pytest.raises(ConfigError, match=message):
        resolve_range(1000, subsets)
