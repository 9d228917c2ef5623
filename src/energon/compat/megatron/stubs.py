"""Stubs of `megatron.energon`, so that editors and type checkers find what the table says.

Building a wheel, or installing a checkout in editable mode, writes them beside the package.
"""

from __future__ import annotations

from pathlib import Path

import energon
from energon.compat.megatron.names import MODULES, Home, is_package, names_of


def write_stubs(folder: Path) -> list[Path]:
    """Write one `.pyi` file for each module of `megatron.energon`.

    Args:
        folder: Where the package `megatron.energon` lies.

    Returns:
        The files, sorted.
    """
    written = []
    for module in MODULES:
        place = folder.joinpath(*module.split(".")) if module else folder
        package = not module or is_package(module)
        file = place / "__init__.pyi" if package else place.with_suffix(".pyi")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stub_of(module))
        written.append(file)
    return sorted(written)


def stub_of(module: str) -> str:
    """Return the stub of a module, by its path below `megatron.energon`; "" for the package."""
    homes = names_of(module)
    if not module:
        homes = {name: Home("energon", name) for name in energon.__all__} | homes
    lines = [
        f"from {home.module} import {home.name} as {name}" for name, home in sorted(homes.items())
    ]
    return "\n".join((*lines, f"\n__all__ = {sorted(homes)!r}", ""))
