"""Delete what killed runs have left: files that were never renamed to what they should become."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from energon.formats.info import META

# The names that files have until they are complete.
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
_INDEX_SUFFIXES = (".tar.idx", ".tar.parts")


def is_leftover(name: str) -> bool:
    """Return whether a file has the name of one that is not complete yet."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftovers(folder: str | os.PathLike[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Delete the temporary files in a folder that would have got one of our names.

    Call it only while nobody else writes these files.

    Returns:
        The names of what was deleted.
    """
    found = []
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and is_ours(match[1]):
            os.unlink(os.path.join(folder, name))
            found.append(name)
    return found


def clear_leftovers(dataset: Path, shards: Iterable[str]) -> None:
    """Delete what killed preparations of a dataset have left. Hold its lock for that."""
    for folder in {(dataset / shard).parent for shard in shards}:
        remove_leftovers(folder, lambda name: name.endswith(_INDEX_SUFFIXES))
    remove_leftovers(dataset / META, lambda name: True)
