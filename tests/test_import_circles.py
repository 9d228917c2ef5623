"""No module imports itself through others, lazy imports and those for types included."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def imports_by_module():
    """Return the modules that each module imports, wherever in it."""
    modules = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imported = defaultdict(set)
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                names = [
                    name if (name := f"{node.module}.{each.name}") in modules else node.module
                    for each in node.names
                ]
            else:
                continue
            imported[module] |= {name for name in names if name in modules} - {module}
    return imported


def test_there_are_no_circles():
    imported = imports_by_module()
    assert "energon.plan.recipe" in imported["energon.task_encoder.recipe"]
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
