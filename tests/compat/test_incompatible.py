"""What counts as compatible, shown on small functions."""

from __future__ import annotations

import pytest

from tests.compat.list_names import _parameters
from tests.compat.names import incompatible


def theirs(a, b=1, *, c=None):
    pass


def same(a, b=2, *, c=3, d=4):
    pass


def renamed(a, x=1, *, c=None):
    pass


def required(a, b, *, c=None):
    pass


def more(a, b=1, *, c=None, d):
    pass


def fewer(a, b=1):
    pass


def anything(*args, **kw):
    pass


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (same, None),
        (anything, None),
        (renamed, "has 'x' where 'b' was"),
        (required, "requires 'b', which had a default"),
        (more, "requires 'd'"),
        (fewer, "takes no parameter 'c'"),
    ],
)
def test_says_why_calls_would_fail(ours, problem):
    assert incompatible(_parameters(theirs), ours) == problem
