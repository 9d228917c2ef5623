"""Compare our names with those of a package that programs were written for.

The lists are data, made from the installed package by `tests/compat/list_names.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POSITIONAL = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
KEYWORD = ("KEYWORD_ONLY", "POSITIONAL_OR_KEYWORD")


def listed(package: str) -> dict[str, Any]:
    """Return the list of a package."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / f"{package}.json").read_text())
    return found


def listed_older() -> list[dict[str, Any]]:
    """Return the lists of older versions of Megatron-Energon, without what is as in the newest."""
    path = Path(__file__).parent / "megatron.energon.older.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def changed_since(older: dict[str, Any], newest: dict[str, Any]) -> dict[str, Any]:
    """Return the list of an older version without what is as in the newest."""
    modules = {
        module: {
            name: entry
            for name, entry in entries.items()
            if newest["modules"].get(module, {}).get(name) != entry
        }
        for module, entries in older["modules"].items()
    }
    return {**older, "modules": {name: each for name, each in modules.items() if each}}


def differences(names: dict[str, Any], ours: str) -> dict[str, str]:
    """Return what differs here, by the name as programs have it.

    Args:
        names: What `listed` returned.
        ours: The package that takes the place of theirs, like "energon.webdataset".
    """
    found: dict[str, str] = {}
    for module, entries in names["modules"].items():
        target = ours + module.removeprefix(names["package"])
        try:
            importlib.import_module(target)
        except ImportError as error:
            found[module] = f"cannot be imported: {error}"
            continue
        # A function of the package may hide its module of the same name.
        loaded = sys.modules[target]
        for name, entry in entries.items():
            found.update(_differences(f"{module}.{name}", entry, loaded, name))
    return found


def _differences(
    where: str, entry: dict[str, Any], module: Any, name: str
) -> Iterator[tuple[str, str]]:
    if entry["kind"] == "module":
        if not hasattr(module, name) and f"{module.__name__}.{name}" not in sys.modules:
            yield where, "missing"
        return
    if not hasattr(module, name):
        yield where, "missing"
        return
    value = getattr(module, name)
    if entry["kind"] in ("value", "imported"):
        return
    if entry["kind"] == "class" and not inspect.isclass(value):
        yield where, f"is not a class, but {type(value).__name__}"
    problem = incompatible(entry["parameters"], value)
    if problem:
        yield where, problem
    for method, parameters in entry.get("methods", {}).items():
        if not hasattr(value, method):
            yield f"{where}.{method}", "missing"
            continue
        problem = incompatible(parameters, getattr(value, method))
        if problem:
            yield f"{where}.{method}", problem


def incompatible(theirs: list[list[Any]] | None, ours: Any) -> str | None:
    """Return why calls that `theirs` accepts may fail with our callable, None if they do not.

    What counts: every positional parameter is at its place under its name, every keyword is
    known, and nothing is required that was not.
    """
    if theirs is None or not callable(ours):
        return None
    try:
        mine = list(inspect.signature(ours).parameters.values())
    except (TypeError, ValueError):
        return None
    mine = [each for each in mine if each.name != "self"]
    if not [each for each in theirs if each[1] not in ("VAR_POSITIONAL", "VAR_KEYWORD")]:
        # It passes on whatever it gets.
        return None
    variadic = {each.kind.name for each in mine}
    if len(mine) > len(theirs):
        # What theirs passes on, ours may name.
        variadic |= {"VAR_POSITIONAL", "VAR_KEYWORD"}
    places = [each.name for each in mine if each.kind.name in POSITIONAL]
    keywords = {each.name for each in mine if each.kind.name in KEYWORD}
    place = 0
    for name, kind, _ in theirs:
        if kind in POSITIONAL:
            known = places[place] if place < len(places) else None
            if known is None and "VAR_POSITIONAL" not in variadic:
                return f"takes no parameter {name!r} at place {place}"
            is_private = name.startswith("_") and not name.startswith("__")
            if known is not None and known != name and not is_private:
                return f"has {known!r} where {name!r} was"
            place += 1
        elif kind == "KEYWORD_ONLY":
            if name not in keywords and "VAR_KEYWORD" not in variadic:
                return f"takes no parameter {name!r}"
        elif kind not in variadic:
            return f"takes no {kind.lower().replace('_', ' ')}"
    given = {name for name, _, _ in theirs}
    theirs_variadic = {kind for _, kind, _ in theirs}
    for each in mine:
        required = each.default is each.empty and each.kind.name in (*POSITIONAL, "KEYWORD_ONLY")
        handed_on = each.kind.name == "KEYWORD_ONLY" and "VAR_KEYWORD" in theirs_variadic
        if required and not {each.name, f"_{each.name}"} & given and not handed_on:
            return f"requires {each.name!r}"
    required_now = {each.name for each in mine if each.default is each.empty}
    for name, kind, has_default in theirs:
        if has_default and name in required_now and kind in (*POSITIONAL, "KEYWORD_ONLY"):
            return f"requires {name!r}, which had a default"
    return None
