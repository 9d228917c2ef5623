"""What a process may use of its machine, CPUs and memory, and how much memory it uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

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
    """Return how many CPUs the control group may keep busy; None if it has no limit.

    Args:
        cgroup: Where control groups are shown.
    """
    return min(filter(None, map(_quota_of, _groups(cgroup, "cpu"))), default=None)


def usable_memory(cgroup: Path = CGROUP) -> int | None:
    """Return how much memory this process may use, in bytes; None if the system does not tell.

    Args:
        cgroup: Where control groups are shown.
    """
    try:
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (ValueError, OSError):
        sizes = []
    for folder in _groups(cgroup, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # also "max"
                sizes.append(int((folder / name).read_text()))
    return min(sizes, default=None)


def _groups(cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control group of this process and of those that it is part of.

    Containers see their own group at the top, and may be told paths that only their host knows.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in ["0::/", f"0:{controller}:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = cgroup / controllers
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield top / group.relative_to("/")


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except ValueError:  # "max"
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
