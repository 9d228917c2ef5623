"""Measure how long a host takes for its batches, and for the hooks of some of them.

Looks at a host find out what it does, but not for how long: on a busy machine they come late, often
only when the host waits for something. So reading blocks is measured, and in some batches each call
of a hook. Each look earns the host some calls, in proportion to the time since the last one, which
the next batches use up. So the time that measuring takes is bounded, and which batches are measured
does not depend on how long they take: all of them, if calls take a millisecond or so.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from energon.loader.monitoring.accounts import BATCHES, CHOSEN, READ, Spent, account
from energon.stages.hooks.clock import HookClock
from energon.stages.lane import Host

CALL_SECONDS = 1.3e-6
"""What it takes to measure a call."""
BATCH_CALLS = 6
"""As many calls take as long as measuring a batch without any: one whose samples meet no hook."""
SHARE = 0.001
"""The share of the time that this may take."""
FIRST_CALLS = 1000
"""How many calls are measured before the first look."""
LONGEST_PAUSE = 10.0
"""A longer pause between looks earns no more than this one, in seconds."""


class BatchClock:
    """Measures the batches of a host.

    The host calls it only for batches that are measured: others should take no longer for it.

    Args:
        host: What the lanes of the host share.

    Attributes:
        is_due: Whether hooks are measured in the next batch.
        seconds: How long batches have taken, all of which the host adds itself. It need not, if it
            is known how long the trainer waits for it.
    """

    def __init__(self, host: Host) -> None:
        self.is_due = True
        self.seconds = 0.0
        self._host = host
        self._hooks = HookClock()
        self._calls = float(FIRST_CALLS)
        self._began = self._read_before = 0.0

    def earn(self, seconds: float) -> None:
        """Let calls be measured for some more time, from the next batch on."""
        self._calls = max(0.0, self._calls) + min(seconds, LONGEST_PAUSE) * SHARE / CALL_SECONDS
        self.is_due = True

    def begin(self) -> None:
        """Measure the calls of hooks in the batch that begins now."""
        self._host.clock, self._read_before = self._hooks, self._host.read_seconds
        self._began = perf_counter()

    def end(self) -> Counter[str]:
        """Return what was measured since the last such batch, as statistics."""
        seconds = perf_counter() - self._began
        host, hooks = self._host, self._hooks
        times = {
            Spent(BATCHES): self.seconds,
            Spent(CHOSEN): seconds - (host.read_seconds - self._read_before),
            Spent(READ): host.read_seconds,
            **{Spent(name, leaf): taken for (name, leaf), taken in hooks.seconds.items()},
        }
        found = Counter({account(each, "timed"): round(1e6 * t) for each, t in times.items() if t})
        for of, slow in hooks.slow.items():
            found[account(Spent(*of), "slow")] = round(1e6 * sum(slow))
            found[account(Spent(*of), "calls")] = len(slow)
        self._calls -= hooks.calls + BATCH_CALLS
        self.is_due = self._calls > 0
        hooks.clear()
        self.seconds, host.read_seconds, host.clock = 0.0, 0.0, None
        return found
