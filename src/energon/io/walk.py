"""Walk the folders of this machine, and match paths against patterns.

Reading and packing share one rule: files and folders whose names begin with a dot belong to tools
(`.git`, `.ipynb_checkpoints`, `.nv-meta`) and are skipped, unless a pattern names them.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from fnmatch import translate

from energon.errors import DatasetNotFoundError, StorageError
from energon.limits import WALKED_ENTRIES, WALKED_SECONDS
from energon.messages import warn_once

logger = logging.getLogger("energon")

_States = frozenset[int]
"""How many steps of a pattern the steps of a path may have matched."""


class PathPattern:
    """A pattern for paths: `*`, `?` and `[…]` within a name, `**` for any folders.

    Args:
        pattern: The pattern, with slashes between names.
        hidden: Whether wildcards match hidden names.

    Example:
        >>> pattern = PathPattern("**/**/*.tar")
        >>> [pattern.matches(path) for path in ("0.tar", "a/b/0.tar", "a/.b/0.tar", "a/0.txt")]
        [True, True, False, False]
    """

    def __init__(self, pattern: str, *, hidden: bool = False) -> None:
        self.pattern = pattern
        self._hidden = hidden
        steps = [step for step in pattern.split("/") if step]
        # Several `**` in a row match what one does.
        self._steps = [
            step for at, step in enumerate(steps) if step != "**" or steps[at - 1 : at] != ["**"]
        ]
        self._fits = [re.compile(translate(step)).match for step in self._steps]
        self.start = self._with_skipped({0})

    @property
    def names_hidden(self) -> bool:
        """Whether a hidden name can match."""
        return self._hidden or any(step.startswith(".") for step in self._steps)

    def matches(self, path: str) -> bool:
        """Return whether a whole path matches."""
        states = self.start
        for name in path.split("/"):
            states = self.advance(states, name)
        return self.ends(states)

    def advance(self, states: _States, name: str) -> _States:
        """Return the states after one more name of a path; none if it cannot match any more."""
        is_hidden = name.startswith(".") and not self._hidden
        reached = set()
        for state in states:
            if state == len(self._steps):
                continue
            step = self._steps[state]
            if is_hidden and not step.startswith("."):
                continue
            if step == "**":
                reached.add(state)
            elif self._fits[state](name):
                reached.add(state + 1)
        return self._with_skipped(reached)

    def ends(self, states: _States) -> bool:
        """Return whether a path matches that has led to these states."""
        return len(self._steps) in states

    def _with_skipped(self, states: set[int]) -> _States:
        """Add the states after each `**`, which may stand for no folder at all."""
        skipped = {s + 1 for s in states if s < len(self._steps) and self._steps[s] == "**"}
        return frozenset(states | skipped)


def walk_files(
    top: str, pattern: str = "**", *, hidden: bool = False
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a folder of this machine that match a pattern, in the order of paths.

    Links are followed; a folder that can be reached in several ways is visited once for each part
    of the pattern, so loops end.

    Args:
        top: The folder.
        pattern: See `PathPattern`.
        hidden: Whether to include hidden files and folders.

    Yields:
        The path of each file below `top`, and its entry; pipes and devices are included.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If there is more below it than `WALKED_ENTRIES` or `WALKED_SECONDS` allow.
    """
    path_pattern = PathPattern(pattern, hidden=hidden)
    ahead, seen = [("", path_pattern.start)], set()
    left, deadline = WALKED_ENTRIES.value, time.monotonic() + WALKED_SECONDS.value
    while ahead:
        path, states = ahead.pop()
        folder = os.path.join(top, path) if path else top
        try:
            about = os.stat(folder)
            if (visit := (about.st_dev, about.st_ino, states)) in seen:
                continue
            seen.add(visit)
            folders, files = folder_entries(folder, hidden=path_pattern.names_hidden)
        except OSError as error:
            if not path:
                raise DatasetNotFoundError(f"{top}: {error.strerror}; expected a folder") from None
            warn_once(logger, folder, "%s: left out: %s", folder, error.strerror)
            continue
        left -= len(folders) + len(files)
        if left < 0 or time.monotonic() > deadline:
            limit = WALKED_ENTRIES if left < 0 else WALKED_SECONDS
            more = "" if pattern == "**" else f", where {pattern!r} is searched for"
            raise StorageError(
                f"{top}: there is more below this folder{more} than {limit.value:,} "
                f"{limit.meaning}; name a folder further down, or set {limit.variable}"
            )
        prefix = f"{path}/" if path else ""
        for entry in files:
            if path_pattern.ends(path_pattern.advance(states, entry.name)):
                yield prefix + entry.name, entry
        for entry in reversed(folders):
            if inner := path_pattern.advance(states, entry.name):
                ahead.append((prefix + entry.name, inner))


def folder_entries(
    folder: str, *, hidden: bool = False
) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the folders directly in a folder of this machine, and everything else, by name.

    Args:
        folder: The folder.
        hidden: Whether to include hidden ones.

    Raises:
        OSError: If it cannot be listed.
    """
    with os.scandir(folder) as entries:
        own = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    own.sort(key=lambda entry: entry.name)
    are_folders = list(map(_is_folder, own))
    folders = [entry for entry, is_folder in zip(own, are_folders, strict=True) if is_folder]
    files = [entry for entry, is_folder in zip(own, are_folders, strict=True) if not is_folder]
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def is_hidden(path: str) -> bool:
    """Return whether a file is hidden, or in a hidden folder."""
    return path.startswith(".") or "/." in path
