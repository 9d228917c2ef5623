"""Let one process of a machine build a join index while the others wait for it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Wait until no other process holds `path`, and hold it. It ends with the process.

    Where a file system has no locks, nobody waits: what is locked here may be done twice.

    Raises:
        OSError: If the file cannot be written.
    """
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # Deleted before it is let go: who opened it meanwhile sees that it is gone.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return descriptor
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the process that held it has deleted it meanwhile
