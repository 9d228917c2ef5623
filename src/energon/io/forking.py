"""Refuse what would hang: object stores in a process forked from one that has used them.

The library that talks to object stores has threads of its own, which a forked child does not
inherit; a request there would wait for them for ever.
"""

from __future__ import annotations

import os

from energon.errors import StorageError

_used_in: int | None = None


def check_process(origin: str) -> None:
    """Note that this process talks to `origin`, through threads that no child inherits.

    Raises:
        StorageError: If this process was forked from one that had done so before.
    """
    global _used_in
    pid = os.getpid()
    if _used_in is None:
        _used_in = pid
    elif _used_in != pid:
        raise StorageError(
            f"{origin}: process {pid} was forked from {_used_in}, which had read from an object "
            "store before; its connections cannot be used in a fork. Start workers with "
            "start_method='forkserver' (the default) or 'spawn'"
        )
