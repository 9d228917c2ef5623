"""Measure how long a host takes for its batches, and for the hooks of some of them.

Looks at a host find out what it does, but not for how long: on a busy machine they come late, often
only when the host waits for something. So the time of all batches and blocks is measured, and in
some batches that of each call of a hook. These are chosen at random, as many as cost next to
nothing: all of them if calls take a third of a millisecond or more.
"""

from __future__ import annotations

import random
from collections import Counter

from energon.loader.monitoring.accounts import BATCHES, CHOSEN, READ, Spent, account
from energon.stages.clock import HookClock
from energon.stages.lane import Host

CALL_SECONDS = 0.3e-6
"""What it takes to measure a call."""
SHARE = 0.001
"""The share of the time that this may take."""


class BatchClock:
    """Measures the batches of a host, which adds to `seconds` itself: calls would take longer.

    Args:
        host: What the lanes of the host share.

    Attributes:
        due: When the next batch is chosen, in seconds of `perf_counter`.
        seconds: How long all batches since the last one that was chosen have taken.
    """

    def __init__(self, host: Host) -> None:
        self.due = self.seconds = 0.0
        self._host = host
        self._hooks = HookClock()
        self._random = random.Random()
        self._read_before = 0.0

    def choose(self) -> None:
        """Measure the calls of hooks in the batch that begins now."""
        self._host.clock, self._read_before = self._hooks, self._host.read_seconds

    def take(self, now: float, seconds: float) -> Counter[str]:
        """Return what was measured, as statistics, when a chosen batch has ended.

        Args:
            now: When it has ended.
            seconds: How long it took.
        """
        host, hooks = self._host, self._hooks
        times = {
            Spent(BATCHES): self.seconds,
            Spent(CHOSEN): seconds - (host.read_seconds - self._read_before),
            Spent(READ): host.read_seconds,
            **{Spent(name, leaf): taken for (name, leaf), taken in hooks.seconds.items()},
        }
        pause = max(0.0, hooks.calls * CALL_SECONDS / SHARE - seconds)
        self.due = now + pause * self._random.uniform(0.5, 1.5)
        hooks.seconds.clear()
        hooks.calls, self.seconds, host.read_seconds, host.clock = 0, 0.0, 0.0, None
        return Counter({account(spent, "timed"): round(1e6 * t) for spent, t in times.items() if t})
