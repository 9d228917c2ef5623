"""Record the files that a thread opens."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident

_paths: dict[int, list[str]] = {}
"""The paths of what each watched thread has opened."""


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Collect the paths of files that this thread opens; others may belong to earlier tests."""
    _add_hook()
    paths: list[str] = []
    _paths[get_ident()] = paths
    try:
        yield paths
    finally:
        del _paths[get_ident()]


@cache
def _add_hook() -> None:
    # A hook stays for the life of a process, so there is one, and it is quiet most of the time.
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[object, ...]) -> None:
    # As an interpreter ends, the names of this module are None before the hook is gone.
    if not _paths or event != "open" or not isinstance(arguments[0], str | os.PathLike):
        return
    if (paths := _paths.get(get_ident())) is not None:
        paths.append(os.fspath(arguments[0]))
