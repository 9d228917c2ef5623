"""Measure how long a host takes for its batches, and for the hooks of some of them.

Looks at a host find out what it does, but not for how long: on a busy machine they come late, often
only when the host waits for something. So the time of all batches and blocks is measured, and in
some batches that of each call of a hook. These are chosen at random, as many as cost next to
nothing: all of them if calls take a third of a millisecond or more.
"""

from __future__ import annotations

import random
from collections import Counter
from time import perf_counter

from energon.loader.monitoring.accounts import BATCHES, CHOSEN, READ, Spent, account
from energon.stages.clock import HookClock
from energon.stages.lane import Host

CALL_SECONDS = 0.3e-6
"""What it takes to measure a call."""
SHARE = 0.001
"""The share of the time that this may take."""


class BatchClock:
    """Measures the batches of a host.

    Args:
        host: What the lanes of the host share.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._hooks = HookClock()
        self._random = random.Random()
        self._began = self._next = self._seconds = self._read_before = 0.0

    def begin(self) -> None:
        """Begin a batch."""
        now = self._began = perf_counter()
        if now < self._next:
            self._host.clock = None
            return
        self._host.clock, self._read_before = self._hooks, self._host.read_seconds

    def end(self) -> Counter[str] | None:
        """End a batch; return what was measured since the last one that was chosen, if this is."""
        host, hooks, now = self._host, self._hooks, perf_counter()
        seconds = now - self._began
        self._seconds += seconds
        if host.clock is None:
            return None
        found = Counter(
            {
                account(Spent(name, leaf), "timed"): round(1e6 * taken)
                for (name, leaf), taken in hooks.seconds.items()
            }
        )
        read = host.read_seconds - self._read_before
        for name, taken in ((BATCHES, self._seconds), (CHOSEN, seconds - read)):
            found[account(Spent(name), "timed")] = round(1e6 * taken)
        found[account(Spent(READ), "timed")] = round(1e6 * host.read_seconds)
        pause = hooks.calls * CALL_SECONDS / SHARE - seconds
        self._next = now + pause * self._random.uniform(0.5, 1.5)
        hooks.seconds.clear()
        hooks.calls, self._seconds, host.read_seconds = 0, 0.0, 0.0
        return found
