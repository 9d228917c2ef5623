"""The time that hosts of lanes spend on each stage, as it travels in the statistics of lanes.

Statistics are integers by name, so times are microseconds under names made by `account`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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
