"""How much tests try: a share, another one in each run, and in CI a larger one, always the same.

`.ci/release` tries everything.
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
    """Return one in `share` of the items, in their order; in CI two, and for a release all.

    The values of parameters may be chosen with it; `ENERGON_FULL_EFFORT=1` runs all of them.
    """
    size, count = len(items), -(-len(items) // share)
    if FULL or (2 * count >= size and IN_CI):
        return items
    if IN_CI:
        return [items[number * size // (2 * count)] for number in range(2 * count)]
    return [items[number] for number in sorted(_rng.sample(range(size), count))]


def mixed(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """Return as many combinations as the longest axis has values, with every value of each axis.

    For axes that do not depend on each other: their product proves little more and takes a multiple
    of the time. Outside CI, every run combines them differently.
    """
    if not IN_CI:
        axes = tuple(_rng.sample(axis, len(axis)) for axis in axes)
    count = max(map(len, axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(count)]
