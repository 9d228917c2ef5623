"""How much of a property tests try: a share, another one in each run, and in CI always the same.

`.ci/release` tries all examples of all properties.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IN_CI = "CI" in os.environ
FULL = "ENERGON_FULL_EFFORT" in os.environ
EXAMPLES_SHARE = 1 if FULL else 5 if IN_CI else 8
"""Of so many examples that a property asks for, one is tried."""

_rng = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
"""The same in all processes of a run, which have to collect the same tests."""


def some(items: Sequence[T], share: int = 3) -> Sequence[T]:
    """Return all items in CI; elsewhere one in `share` of them, in their order.

    The values of parameters may be chosen with it; `CI=1` runs the one that has failed.
    """
    if IN_CI:
        return items
    chosen = _rng.sample(range(len(items)), -(-len(items) // share))
    return [items[number] for number in sorted(chosen)]


def mixed(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """Return as many combinations as the longest axis has values, with every value of each axis.

    For axes that do not depend on each other: their product proves little more and takes a multiple
    of the time. Outside CI, every run combines them differently.
    """
    if not IN_CI:
        axes = tuple(_rng.sample(axis, len(axis)) for axis in axes)
    count = max(map(len, axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(count)]
