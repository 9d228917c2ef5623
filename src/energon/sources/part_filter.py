"""Parts of samples that are chosen by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class PartFilter:
    """The names of parts that a function accepts: stands for the set of them.

    Args:
        accepts: Says whether the part of a name is read. Asked once for each name.
    """

    def __init__(self, accepts: Callable[[str], Any]) -> None:
        self.accepts = accepts
        self._known: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if name not in self._known:
            self._known[str(name)] = bool(self.accepts(str(name)))
        return self._known[str(name)]

    def issuperset(self, names: Iterable[str]) -> bool:
        """Return whether all of the names are accepted."""
        return all(name in self for name in names)
