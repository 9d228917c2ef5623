"""No module imports itself through others, lazy imports and those for types included."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from tests.source_modules import source_modules


def imports_by_module():
    """Return the modules that each module imports, wherever in it."""
    modules = {
        each.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): each
        for each in source_modules()
    }
    imported = {}
    for name, module in modules.items():
        assert not [each for each, _ in module.imports if each.startswith(".")], name
        found = {
            full if (full := f"{package}.{each}") in modules else package
            for package, names in module.imports
            for each in names or ("",)
        }
        imported[name] = {each for each in found if each in modules} - {name}
    return imported


def test_there_are_no_circles():
    imported = imports_by_module()
    assert "energon.plan.recipe" in imported["energon.task_encoder.recipe"]
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
