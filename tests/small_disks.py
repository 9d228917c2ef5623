"""Disks that are full, for tests of what happens then."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    """Mount a disk of that size; skips the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("only root may mount a small disk; this works as in `unshare -rm make test`")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def small_files(folder: Path, size_kib: int) -> Iterator[Path]:
    """Forbid this process larger files: writing one fails as on a full disk, for any user."""
    folder.mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_kib * 1024, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LITTLE_ROOM = [
    pytest.param(small_disk, "No space left on device", id="disk"),
    pytest.param(small_files, "File too large", id="limit"),
]
"""What leaves little room for a file, and what the system then says."""
REMEDIES = {
    "No space left on device": "free some space",
    "File too large": "raise `ulimit -f`, or use another disk,",
}
"""What we say in addition."""


def fill(folder: Path, free_kib: int) -> None:
    """Fill a disk up to so much."""
    about = os.statvfs(folder)
    size = about.f_bavail * about.f_frsize - free_kib * 1024
    with open(folder / "filler", "wb") as file:
        file.write(bytes(max(0, size)))
