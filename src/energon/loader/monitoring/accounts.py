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
REBUILD = "rebuild"
"""What the trainer does with a batch that a process has sent; not looked at, but measured."""
GIL = "gil"
"""The time before looks that had to wait for the GIL, so that some thread ran Python code."""

_PREFIX: Final = "time "
_Kind = Literal["running", "blocked", "slow", "calls"]


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
    """The seconds of a stage.

    Args:
        running: With the thread on a CPU, or ready to run.
        blocked: With the thread waiting for something else, such as a disk, a lock or the GIL.
        slow: In calls of a hook that took much longer than a look is due, out of the two above.
        calls: The number of these calls.
    """

    running: float = 0.0
    blocked: float = 0.0
    slow: float = 0.0
    calls: int = 0

    @property
    def seconds(self) -> float:
        """Seconds in total."""
        return self.running + self.blocked


def account(spent: Spent, kind: _Kind = "running") -> str:
    """Return the name under which statistics of a lane have the microseconds for it."""
    return f"{_PREFIX}{kind} {spent.stage} {spent.leaf}"


def split_accounts(counts: Mapping[str, int]) -> tuple[dict[Spent, Times], dict[str, int]]:
    """Return the times that are in statistics, and what else there is.

    Example:
        >>> split_accounts({"batches": 3, account(Spent("read", 1)): 250_000})
        ({Spent(stage='read', leaf=1): Times(running=0.25, blocked=0.0, slow=0.0, calls=0)}, \
{'batches': 3})
    """
    times: dict[Spent, Times] = {}
    others: dict[str, int] = {}
    for name, count in counts.items():
        if not name.startswith(_PREFIX):
            others[name] = count
            continue
        kind, _, spent = name.removeprefix(_PREFIX).partition(" ")
        stage, _, leaf = spent.rpartition(" ")
        about = times.setdefault(Spent(stage, int(leaf)), Times())
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
