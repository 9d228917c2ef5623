"""List the public names of an installed package as JSON: what `names` compares ours with.

Runs in the environment of the peers, started by `peers.py`, so it imports nothing of energon. Of
each module that can be imported it lists what is defined in the package: classes with their public
methods, functions with their parameters, and values. Classes and functions of `megatron.energon`
that a module only imports are listed as such. Underscored names are listed where they are given:
`--also MODULE:NAME,NAME`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import sys
import types
from typing import Any, ParamSpec, TypeVar

_UNINTERESTING = (types.ModuleType, type(__import__("typing").Any))


def main() -> None:
    """List the names of the package that the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--also", action="append", default=[], metavar="MODULE:NAME,NAME")
    arguments = parser.parse_args()
    # Beside this script is a folder called as one of the packages.
    sys.path.pop(0)
    if arguments.package == "megatron.energon":
        _let_torchvision_be_imported()
    also = {}
    for each in arguments.also:
        module, _, names = each.partition(":")
        also[module] = names.split(",")
    found = {
        "package": arguments.package,
        "version": _version(arguments.package),
        "modules": {
            name: listed
            for name in _modules(arguments.package)
            if (listed := _names(name, arguments.package, also.get(name, ())))
        },
    }
    print(_compact(found))


def _compact(found: dict[str, Any]) -> str:
    """Return it as JSON with a line for each name."""
    modules = []
    for module, entries in found["modules"].items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        modules.append(f" {json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n }")
    about = {name: found[name] for name in ("package", "version")}
    return json.dumps(about)[:-1] + ', "modules": {\n' + ",\n".join(modules) + "\n}}"


def _let_torchvision_be_imported() -> None:
    """Define what it describes, where its own library is for another build of torch."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []


def _version(package: str) -> str:
    from importlib.metadata import packages_distributions, version

    top = package.partition(".")[0]
    return version(packages_distributions()[top][0])


def _modules(package: str) -> list[str]:
    root = importlib.import_module(package)
    found = [package]
    for each in pkgutil.walk_packages(root.__path__, package + "."):
        if not any(part.startswith("_") for part in each.name.split(".")):
            found.append(each.name)
    return found


def _names(module: str, package: str, also: Any) -> dict[str, Any]:
    try:
        # A function of the package may hide its module of the same name.
        importlib.import_module(module)
        loaded = sys.modules[module]
    except Exception as error:  # it needs what is not installed
        print(f"{module}: {error}", file=sys.stderr)
        return {}
    names = [name for name in vars(loaded) if not name.startswith("_")]
    return {
        name: _imported(vars(loaded)[name], module, package) or _entry(vars(loaded)[name], package)
        for name in sorted({*names, *also})
        if _belongs(vars(loaded)[name], package)
    }


def _imported(value: Any, module: str, package: str) -> dict[str, Any] | None:
    """Return that a value is at home in another module, which says all else about it."""
    home = getattr(value, "__module__", None)
    if package == "webdataset" or isinstance(value, types.ModuleType) or home in (None, module):
        return None
    inside = isinstance(home, str) and (home + ".").startswith(package + ".")
    return {"kind": "imported"} if inside else None


def _belongs(value: Any, package: str) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith(package + ".")
    if isinstance(value, TypeVar | ParamSpec):
        return False
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and not isinstance(value, _UNINTERESTING):
        return (home + ".").startswith(package + ".")
    return isinstance(value, bool | int | float | str | list | tuple | dict | set | type(None))


def _entry(value: Any, package: str) -> dict[str, Any]:
    if isinstance(value, types.ModuleType):
        return {"kind": "module"}
    if inspect.isclass(value):
        methods = {
            name: _parameters(getattr(value, name))
            for name in dir(value)
            if not name.startswith("_") and _is_own(value, name, package)
        }
        return {"kind": "class", "parameters": _parameters(value), "methods": methods}
    if callable(value):
        return {"kind": "callable", "parameters": _parameters(value)}
    return {"kind": "value", "type": type(value).__name__}


def _is_own(kind: type, name: str, package: str) -> bool:
    """Return whether an attribute of a class comes from a class of the package."""
    home = next((each for each in kind.__mro__ if name in vars(each)), kind)
    if inspect.ismemberdescriptor(vars(home).get(name)):
        return False  # the slot of a field
    return (home.__module__ + ".").startswith(package + ".")


def _parameters(value: Any) -> list[list[Any]] | None:
    """Return name, kind and whether there is a default, of each parameter; None if unknown."""
    try:
        found = [*inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return None
    if _is_curried(value):
        del found[0]
    return [
        [each.name, each.kind.name, each.default is not each.empty]
        for each in found
        if each.name != "self" and not (each.default is not each.empty and _is_private(each.name))
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_curried(value: Any) -> bool:
    """Return whether a call takes all parameters of a function but the first, the stream."""
    return hasattr(value, "__wrapped__") and type(value).__name__ == "RestCurried"


if __name__ == "__main__":
    main()
