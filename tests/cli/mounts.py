"""Mount for tests, by the command."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def mounted(path, mountpoint: Path, *options: str) -> Iterator[Path]:
    """Run `energon mount` until the end of the block."""
    mountpoint.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "energon.cli.main", "mount", path, mountpoint, *options]
    running = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
    try:
        while not mountpoint.is_mount():
            if running.poll() is not None:
                raise RuntimeError(f"mounting has ended: {running.stderr.read()}")
            time.sleep(0.02)
        yield mountpoint
    finally:
        if mountpoint.is_mount():
            subprocess.run(["umount", mountpoint], check=True)
        try:
            running.wait(20)
        finally:
            running.kill()
            running.stderr.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
