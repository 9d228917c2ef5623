"""Modules whose names are at home elsewhere. They are looked up when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

Names = Sequence[str | tuple[str, str]]


def alias(
    module: str, homes: Mapping[str, Names]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module.

    Args:
        module: Its `__name__`.
        homes: For each module in which names are at home, these names; or pairs of a name and
            what it is called at home.
    """
    found: dict[str, tuple[str, str]] = {}
    for home, names in homes.items():
        for entry in names:
            name, original = (entry, entry) if isinstance(entry, str) else entry
            found[name] = home, original

    def look_up(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, original = found[name]
        value = getattr(import_module(home), original)
        setattr(sys.modules[module], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *found})

    return look_up, list_names, sorted(found)
