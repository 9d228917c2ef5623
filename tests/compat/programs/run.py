"""Run the checks of this folder with a package, and print what they found as JSON.

    python tests/compat/programs/run.py webdataset          # the installed peer
    python tests/compat/programs/run.py energon.webdataset  # ours
    python tests/compat/programs/run.py webdataset shuffle  # those with this in their names
    python tests/compat/programs/run.py megatron.energon hooks  # those of this module
    python tests/compat/programs/run.py webdataset patterns  # the same

It runs with any interpreter that has the package, and imports nothing of energon on its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODULES = [
    "reading",
    "pipelines",
    "epochs",
    "projects",
    "stages",
    "decoding",
    "sources",
    "openers",
    "writing",
    "consumers",
    "different",
    "patterns",
]
ENERGON = [
    "datasets",
    "documents",
    "hooks",
    "encoding",
    "loaders",
    "running",
    "parts",
    "trainers",
    "runs",
    "recipes",
    "projects",
]
OLDER = "older"
"""The module of programs for Megatron-Energon 5, which its newest version does not run."""


def results(package: str, folder: str, wanted: str = "") -> dict[str, Any]:
    """Return what each check found, or that it failed; `folder` is used up."""
    module = import_module(package)
    if "torch" in sys.modules:
        # Workers of the peers do not end when their loader is left; torch waits 5 seconds for each
        # before it terminates them.
        import_module("torch.utils.data._utils").MP_STATUS_CHECK_INTERVAL = 0.2
    import_module("common").setup(folder)
    found = {}
    for name, check in checks(package):
        if wanted in (check.__module__ if wanted in (*ENERGON, OLDER, *MODULES) else name):
            try:
                found[name] = as_json(check(module, folder), folder)
            except (Exception, SystemExit) as error:
                found[name] = f"failed: {type(error).__name__}: {error}"[:300]
    return found


def checks(package: str) -> list[tuple[str, Any]]:
    """Return all checks for a package by name."""
    return [
        (name, check)
        for module in ([*ENERGON, OLDER] if package == "megatron.energon" else MODULES)
        for name, check in vars(import_module(module)).items()
        if name.startswith("check_")
    ]


def as_json(value: Any, folder: str) -> Any:
    """Return a value as JSON has it, without what differs from run to run."""
    if isinstance(value, bytes):
        return as_json("b:" + value.decode("latin-1"), folder)
    if isinstance(value, str):
        return value.replace(folder, "FOLDER")
    if isinstance(value, dict):
        return {str(name): as_json(each, folder) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each, folder) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return f"<{type(value).__name__}>"


def main() -> None:
    """Run and print."""
    sys.path[0] = str(HERE / "energon" if sys.argv[1] == "megatron.energon" else HERE)
    os.environ.pop("WDS_CACHE", None)
    for name in {path.stem for path in Path(sys.path[0]).glob("*.py")} & sys.modules.keys():
        del sys.modules[name]  # a package of the same name, in a process that was forked
    # Where its result goes, and what a package prints.
    output, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        found = results(sys.argv[1], folder, "".join(sys.argv[2:]))
    print(json.dumps(found, indent=1), file=output)


if __name__ == "__main__":
    main()
