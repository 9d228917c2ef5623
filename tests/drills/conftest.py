"""How long a drill runs: a few seconds each in CI, an hour by hand.

`make drills` gives every drill `SECONDS` seconds (default: 20). A drill draws its cases from a
seed that it prints when it fails, so that `DRILL_SEED=… make drills` repeats it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Budget:
    """The time that one drill may take, and the seed of its cases."""

    seconds: float
    seed: int

    def rounds(self, at_least: int = 1) -> Iterator[random.Random]:
        """Yield one generator per case until the time is up, and for `at_least` cases anyway."""
        end = time.monotonic() + self.seconds
        number = 0
        while number < at_least or time.monotonic() < end:
            yield random.Random(f"{self.seed}/{number}")
            number += 1


@pytest.fixture
def budget(record_property) -> Budget:
    """Return the budget of a drill."""
    seed = int(os.environ.get("DRILL_SEED", "0" if "CI" in os.environ else str(time.time_ns())))
    record_property("drill_seed", seed)
    return Budget(float(os.environ.get("DRILL_SECONDS", "20")), seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder as a drill, with time enough to run by hand for an hour."""
    for item in items:
        if "tests/drills/" in item.nodeid:
            item.add_marker("drill")
            item.add_marker(pytest.mark.timeout(0))
