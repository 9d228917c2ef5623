"""How much of a property tests try: all of it in CI, a share elsewhere, another one in each run."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

IN_CI = "CI" in os.environ

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
