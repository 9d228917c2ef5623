"""Disks that are full, for tests of what happens then."""

from __future__ import annotations

import contextlib
import os
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
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free_kib: int) -> None:
    """Fill a disk up to so much."""
    about = os.statvfs(folder)
    size = about.f_bavail * about.f_frsize - free_kib * 1024
    with open(folder / "filler", "wb") as file:
        file.write(bytes(max(0, size)))
