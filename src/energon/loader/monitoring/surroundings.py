"""What a process may use of its machine: CPUs, memory, and how long it has waited for either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = CGROUP) -> float:
    """Return how many CPUs this process may keep busy, by affinity and by the quota of its group.

    Args:
        cgroup: Where the control group of the process is shown, as it is in containers.
    """
    try:
        cpus = float(len(os.sched_getaffinity(0)))
    except AttributeError:
        cpus = float(os.cpu_count() or 1)
    quota = cpu_quota(cgroup)
    return cpus if quota is None else min(cpus, quota)


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """Return how many CPUs the control group may keep busy; None if it has no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:  # "max"
        return None


class CpuTimes(NamedTuple):
    """How long a thread has run, and how long it was ready to run and had no CPU, in seconds."""

    used: float
    waited: float


def cpu_times(pid: int | None) -> CpuTimes | None:
    """Return the times of the main thread of a process; None if the system does not tell."""
    if pid is None:
        return None
    try:
        used, waited, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return CpuTimes(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


def memory_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process; None if the system does not tell."""
    if pid is None:
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
