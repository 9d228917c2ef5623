"""Names that programs look for in other modules than the ones that define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def reexport(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that has names of other ones, imported when used.

    Args:
        module: Its name.
        homes: By name, the module of this package that has it; "home:other" if under another
            name, "home:" if it is the module itself.
    """
    package = module.rpartition(".")[0]

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, colon, original = homes[name].partition(":")
        found = import_module(f"{package}.{home}")
        return found if colon and not original else getattr(found, original or name)

    return get
