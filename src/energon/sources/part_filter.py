"""Which parts of samples are read: those of some names, or those that a function chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class PartNames:
    """Names of parts, in which it does not matter whether letters are small or capital.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name.lower() for name in names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.names

    def issuperset(self, names: Iterable[str]) -> bool:
        """Return whether all of the names are among them."""
        return all(name in self for name in names)


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
