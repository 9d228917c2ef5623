"""Make the modules of `megatron.energon` from the table of names, and stubs for editors.

None of them exists as a file. Each looks its names up in `energon` when they are first used, so
importing one costs no more than what the program takes from it.

Building a wheel, or installing a checkout in editable mode, writes the stubs beside the package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from energon.compat.megatron import VERSION, names
from energon.compat.megatron.names import MODULES, is_package, names_of, stand_in_for
from energon.version import __version__

ROOT = "megatron.energon"


class NameTableFinder(MetaPathFinder, Loader):
    """Finds and loads the modules below `megatron.energon`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = fullname.removeprefix(f"{ROOT}.")
        if module == fullname or module not in MODULES:
            return None
        # The table is what stands in these modules, so that is what `inspect` shows.
        return ModuleSpec(fullname, self, origin=names.__file__, is_package=is_package(module))

    def exec_module(self, module: ModuleType) -> None:
        """Give a new module its names, which are looked up when first used."""
        fill(module, module.__name__.removeprefix(f"{ROOT}."))
        module.__file__ = names.__file__


class StandIn(Distribution):
    """Names the release of Megatron-Energon that this package stands for.

    `energon_loader.pth` has every interpreter find it, since programs ask for the version of
    `megatron-energon` before and after they import it. A Megatron-Energon that is installed is
    found first.
    """

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: megatron-energon\nVersion: {VERSION}\n"
            f"Summary: Stands for Megatron-Energon: energon-loader {__version__}\n"
        )

    def locate_file(self, path: Any) -> Path:
        return Path(names.__file__).parent.joinpath(path)


def fill(module: ModuleType, path: str) -> None:
    """Give a module `__getattr__`, `__dir__` and `__all__` as the table has them.

    Args:
        module: The module.
        path: Its path below `megatron.energon`; "" for the package itself.
    """
    homes = names_of(path)
    below = {
        name.removeprefix(f"{path}.").partition(".")[0]
        for name in MODULES
        if name.startswith(f"{path}." if path else "") and name != path
    } - homes.keys()

    def look_up(name: str) -> Any:
        if name in below:
            return import_module(f"{module.__name__}.{name}")
        if name in homes:
            value = homes[name].look_up()
        elif (value := stand_in_for(name)) is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    everything = sorted(homes)
    vars(module).update(
        __doc__=module.__doc__ or f"Names of `{module.__name__}`, all at home in `energon`.",
        __all__=everything,
        __getattr__=look_up,
        __dir__=lambda: sorted({*vars(module), *everything, *below}),
    )


def install(root: ModuleType) -> None:
    """Make `megatron.energon` and all modules below it importable.

    Args:
        root: The package `megatron.energon`.
    """
    if not any(isinstance(each, NameTableFinder) for each in sys.meta_path):
        # First, since folders that hold only stubs would pass for namespace packages.
        sys.meta_path.insert(0, NameTableFinder())
    fill(root, "")
    # `edataclass` is a function of the package and a module below it. Importing a module binds it
    # in its package, so do that first: programs ask the package for the function.
    import_module(f"{ROOT}.edataclass")
    vars(root).pop("edataclass", None)


def write_stubs(folder: Path) -> list[Path]:
    """Write one `.pyi` file for each module of `megatron.energon`.

    Args:
        folder: Where the package `megatron.energon` lies.

    Returns:
        The files, sorted.
    """
    written = []
    for module in MODULES:
        target = folder.joinpath(*module.split(".")) if module else folder
        file = target / "__init__.pyi" if is_package(module) else target.with_suffix(".pyi")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(stub_of(module))
        written.append(file)
    return sorted(written)


def stub_of(module: str) -> str:
    """Return the stub of a module, by its path below `megatron.energon`; "" for the package."""
    homes, shared = names_of(module), names_of("")
    lines = [
        f"from {home.module} import {home.name} as {name}"
        for name, home in sorted(homes.items())
        if not module or shared.get(name) != home
    ]
    if module:
        lines.insert(0, f"from {ROOT} import *")
    return "\n".join((*lines, f"\n__all__ = {sorted(homes)!r}", ""))
