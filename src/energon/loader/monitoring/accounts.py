"""The time that hosts of lanes spend on each stage, as it travels in the statistics of lanes.

Statistics are integers by name, so times are microseconds under names made by `account`.

Looks at a host find out what it does, but not for how long: on a busy machine they come late, often
only when the host waits for something. So reading blocks is measured, and in some batches each call
of a hook. Each look earns the host some calls, in proportion to the time since the last one, which
the next batches use up. So the time that measuring takes is bounded, and which batches are measured
does not depend on how long they take: all of them, if calls take a millisecond or so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, NamedTuple

from energon.stages.hooks.clock import HookClock
from energon.stages.lane import Host

READ, DECODE, AUX, TRANSFER, IDLE, OTHER = "read", "decode", "aux", "transfer", "idle", "other"
"""What is not a hook. `aux` is what hooks read, `other` the work of the loader between all that."""
ELSEWHERE = "elsewhere"
"""What a trainer does between the batches that it makes."""
BATCHES = "batches"
"""All that is done to make batches."""
CHOSEN = "chosen"
"""What is done to make the batches in which hooks are timed, except for reading blocks."""
REBUILD = "rebuild"
"""What the trainer does with a batch that a process has sent."""
GIL = "gil"
"""The time before looks that had to wait for the GIL, so that some thread ran Python code."""

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

_PREFIX: Final = "time"
_BETWEEN: Final = "\t"
_Kind = Literal["seen", "timed", "slow", "calls"]


class Spent(NamedTuple):
    """What time is spent on.

    Args:
        stage: One of the names above, or the name of a hook.
        leaf: Number of the dataset; -1 if there are several, or none.
        within: What it is a part of whose time is known: the name of a hook, `READ` for reading a
            block, or "".
    """

    stage: str
    leaf: int = -1
    within: str = ""


@dataclass
class Times:
    """The seconds of a stage.

    Args:
        seen: Before looks that found it.
        timed: By the clock.
        slow: In slow calls of a hook, out of `timed`.
        calls: The number of these calls.
    """

    seen: float = 0.0
    timed: float = 0.0
    slow: float = 0.0
    calls: int = 0


def account(spent: Spent, kind: _Kind = "seen") -> str:
    """Return the name under which statistics of a lane have the microseconds for it."""
    return _BETWEEN.join([_PREFIX, kind, spent.stage, str(spent.leaf), spent.within])


def split_accounts(counts: Mapping[str, int]) -> tuple[dict[Spent, Times], dict[str, int]]:
    """Return the times that are in statistics, and what else there is.

    Example:
        >>> times, others = split_accounts({"batches": 3, account(Spent("read", 1)): 250_000})
        >>> times[Spent("read", 1)].seen, others
        (0.25, {'batches': 3})
    """
    times: dict[Spent, Times] = {}
    others: dict[str, int] = {}
    for name, count in counts.items():
        if not name.startswith(_PREFIX + _BETWEEN):
            others[name] = count
            continue
        _, kind, stage, leaf, within = name.split(_BETWEEN)
        about = times.setdefault(Spent(stage, int(leaf), within), Times())
        setattr(about, kind, count if kind == "calls" else count / 1e6)
    return times, others


class BatchClock:
    """Measures the batches of a host.

    The host calls it only for batches that are measured: others should take no longer for it.

    Args:
        host: What the lanes of the host share.

    Attributes:
        is_due: Whether hooks are measured in the next batch.
    """

    def __init__(self, host: Host) -> None:
        self.is_due = True
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
            Spent(BATCHES): host.batch_seconds,
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
        host.batch_seconds, host.read_seconds, host.clock = 0.0, 0.0, None
        return found


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
