"""How long a drill runs: a few seconds each in CI, an hour by hand.

`make drills` gives every drill `SECONDS` seconds (default: 20). A drill draws its cases from a
seed that it prints when it fails, so that `DRILL_SEED=… make drills` repeats it. What each has
done is summed up at the end; docs/reliability.md has such figures.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest


@dataclass(frozen=True)
class Budget:
    """The time that one drill may take, and the seed of its cases."""

    seconds: float
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    """What the drill has done, by name: cases, and what it counts itself."""

    def rounds(self, at_least: int = 1) -> Iterator[random.Random]:
        """Yield one generator per case until the time is up, and for `at_least` cases anyway."""
        end = time.monotonic() + self.seconds
        number = 0
        while number < at_least or time.monotonic() < end:
            yield random.Random(f"{self.seed}/{number}")
            number += 1
            self.done["cases"] += 1


@pytest.fixture
def budget(record_property) -> Iterator[Budget]:
    """Give the budget of a drill, and note what it has done."""
    seed = int(os.environ.get("DRILL_SEED", "0" if "CI" in os.environ else str(time.time_ns())))
    record_property("drill_seed", seed)
    budget = Budget(float(os.environ.get("DRILL_SECONDS", "20")), seed)
    yield budget
    record_property("drill_done", dict(budget.done))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the drills have done."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            done = dict(getattr(report, "user_properties", ())).get("drill_done")
            if done and report.when == "teardown":
                counts = ", ".join(f"{count:,} {name}" for name, count in done.items())
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {counts}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder as a drill, with time enough to run by hand for an hour."""
    for item in items:
        if "tests/drills/" in item.nodeid:
            item.add_marker("drill")
            item.add_marker(pytest.mark.timeout(0))
