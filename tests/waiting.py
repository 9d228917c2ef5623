"""Wait for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait as long as it takes; the time limit of the test ends what never comes."""
    while not condition():
        time.sleep(0.01)


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of these processes runs."""
    wait_until(lambda: not any(map(_is_running, pids)))


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid` that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = _status(path)
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found += [int(path.parent.name), *descendants(int(path.parent.name))]
    return found


def _is_running(pid: int) -> bool:
    try:
        return _status(Path(f"/proc/{pid}/stat"))[0] != "Z"
    except OSError:
        return False


def _status(path: Path) -> list[str]:
    """Return the fields of a process after its name: its state, its parent, and others."""
    return path.read_text().rpartition(")")[2].split()
