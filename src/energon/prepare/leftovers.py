"""Delete what killed runs have left: files that were never renamed to what they should become."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

# The names that `energon.io.atomic` gives.
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}")


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
