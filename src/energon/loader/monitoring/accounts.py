"""The time that hosts of lanes spend on each stage, as it travels in the statistics of lanes.

Statistics are integers by name, so times are microseconds under names made by `account`.

Making batches, reading blocks and sending batches are always measured, and each call of a hook in
some batches, from which the times of hooks are extrapolated. The next batch is measured when the
last one has cost no more than a thousandth of the time since. So the cost is bounded, and the
choice does not depend on how long batches take: all of them are measured if calls take a
millisecond or so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, NamedTuple

from energon.stages.hooks.clock import HookClock, HookSpan
from energon.stages.lane import Host

READ, TRANSFER, OTHER = "read", "transfer", "other"
"""Stages that are not hooks; `other` is the work of the loader between them."""
BATCHES = "batches"
"""All that is done to make batches."""
CHOSEN = "chosen"
"""What is done to make the batches in which hooks are timed, except for reading blocks."""
REBUILD = "rebuild"
"""Rebuilding, in the trainer, of batches that processes have sent."""

CALL_SECONDS = 1.3e-6
"""What it takes to measure a call."""
BATCH_CALLS = 6
"""As many calls take as long as measuring a batch without any: one whose samples meet no hook."""
SHARE = 0.001
"""The share of the time that this may take."""
FIRST_CALLS = 1000
"""How many calls are measured in any case."""

_PREFIX: Final = "time"
_BETWEEN: Final = "\t"
_Kind = Literal["timed", "slow", "calls"]
_FIELDS = {"timed": "seconds", "slow": "slow_seconds", "calls": "slow_calls"}
"""The fields of `Times` by kind."""


class Spent(NamedTuple):
    """What time is spent on.

    Args:
        stage: One of the names above, or the name of a hook.
        leaf: Number of the dataset; -1 if there are several, or none.
    """

    stage: str
    leaf: int = -1


@dataclass
class Times:
    """The time of a stage.

    Args:
        seconds: All of it, or all that was measured.
        slow_calls: Number of calls of a hook that took very long.
        slow_seconds: How long these took in total.
    """

    seconds: float = 0.0
    slow_calls: float = 0
    slow_seconds: float = 0.0


def account(spent: Spent, kind: _Kind = "timed") -> str:
    """Return the name under which statistics of a lane have the microseconds for it."""
    return _BETWEEN.join([_PREFIX, kind, spent.stage, str(spent.leaf)])


def split_accounts(counts: Mapping[str, int]) -> tuple[dict[Spent, Times], dict[str, int]]:
    """Return the times that are in statistics, and what else there is.

    Example:
        >>> times, others = split_accounts({"batches": 3, account(Spent("read", 1)): 250_000})
        >>> times[Spent("read", 1)].seconds, others
        (0.25, {'batches': 3})
    """
    times: dict[Spent, Times] = {}
    others: dict[str, int] = {}
    for name, count in counts.items():
        if not name.startswith(_PREFIX + _BETWEEN):
            others[name] = count
            continue
        _, kind, stage, leaf = name.split(_BETWEEN)
        stage_times = times.setdefault(Spent(stage, int(leaf)), Times())
        number = count if kind == "calls" else count / 1e6
        setattr(stage_times, _FIELDS[kind], number)
    return times, others


class BatchClock:
    """Measures the batches of a host.

    Args:
        host: What the lanes of the host share.

    Attributes:
        due_at: When the calls of hooks are measured again, by `time.perf_counter`.
    """

    def __init__(self, host: Host) -> None:
        self.due_at = 0.0
        self._host = host
        self._hooks = HookClock()
        self._free_calls = FIRST_CALLS
        self._began = self._read_before = 0.0

    def begin(self, spans: list[HookSpan] | None = None) -> None:
        """Measure the calls of hooks in the batch that begins now.

        Args:
            spans: Takes the calls one by one, for a trace.
        """
        self._host.clock, self._read_before = self._hooks, self._host.read_seconds
        self._hooks.spans = spans
        self._began = perf_counter()

    def end(self) -> Counter[str]:
        """Return the times since the last measured batch, as statistics."""
        now = perf_counter()
        host, hooks = self._host, self._hooks
        times = {
            Spent(BATCHES): host.batch_seconds,
            Spent(CHOSEN): now - self._began - (host.read_seconds - self._read_before),
            Spent(READ): host.read_seconds,
            Spent(TRANSFER): host.transfer_seconds,
            **{Spent(name, leaf): taken for (name, leaf), taken in hooks.seconds.items()},
        }
        counts = Counter({account(each): round(1e6 * t) for each, t in times.items() if t})
        for of, slow in hooks.slow.items():
            counts[account(Spent(*of), "slow")] = round(1e6 * sum(slow))
            counts[account(Spent(*of), "calls")] = len(slow)
        calls = hooks.calls + BATCH_CALLS
        self._free_calls -= calls
        self.due_at = now if self._free_calls > 0 else now + calls * CALL_SECONDS / SHARE
        hooks.clear()
        host.batch_seconds, host.read_seconds, host.transfer_seconds = 0.0, 0.0, 0.0
        host.clock = None
        return counts


class CpuTimes(NamedTuple):
    """How long a thread has run, and how long it was ready to run without a CPU, in seconds."""

    used: float
    waited: float


def cpu_times(thread: int) -> CpuTimes | None:
    """Return the CPU times of a thread by its number; None if the system does not report them."""
    try:
        with open(f"/proc/{thread}/schedstat") as file:
            used, waited, *_ = file.read().split()
        return CpuTimes(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None
