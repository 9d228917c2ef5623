"""Machines with little CPU or a slow disk, for tests of what is said about them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from energon.surroundings import CGROUP
from tests.waiting import wait_until


@contextmanager
def control_group(controller: str, limits: Mapping[str, str]) -> Iterator[Path]:
    """Yield a control group with these limits, of either version; skips where none can be made.

    Args:
        controller: What it limits.
        limits: The contents of its files; those of the other version do not exist.
    """
    top = CGROUP / controller if (CGROUP / controller).is_dir() else CGROUP
    group = top / f"energon-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made here")
    try:
        try:
            files = [(group / name, value) for name, value in limits.items()]
            written = [file.write_text(value) for file, value in files if file.exists()]
        except OSError:
            written = []
        if not written:
            pytest.skip(f"control groups cannot limit {controller} here")
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@contextmanager
def moved_to(group: Path) -> Iterator[None]:
    """Let this process be part of a control group meanwhile."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    known = [line.split(":", 2)[1:] for line in lines]
    before = next((path for names, path in known if group.parent.name in names.split(",")), "/")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        Path(f"{group.parent}{before}", "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def half_a_cpu() -> Iterator[Path]:
    """Yield a control group that may keep half a CPU busy."""
    limits = {
        "cpu.cfs_period_us": "20000",
        "cpu.cfs_quota_us": "10000",
        "cpu.max": "10000 20000",
    }
    with control_group("cpu", limits) as group:
        yield group


@contextmanager
def slow_disk(folder: Path, bytes_per_second: int) -> Iterator[None]:
    """Read the files below a folder from their disk, and slowly, instead of from memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fdatasync(file.fileno())  # fsync does nothing in tests
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    if not os.path.exists(f"/sys/dev/block/{number}"):
        pytest.skip("these files are on no disk")
    limits = {
        "blkio.throttle.read_bps_device": f"{number} {bytes_per_second}",
        "io.max": f"{number} rbps={bytes_per_second}",
    }
    with control_group("blkio", limits) as group, moved_to(group):
        yield
