"""The packages that ours takes the place of, in an environment of their own.

`make record` installs them, and records anew which names they have and what the small programs of
this folder give with them; the tests compare ours with that. What a new release changes is then in
the difference of these files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from energon.io.atomic import locked
from tests.compat.names import changed_since, listed
from tests.compat.programs.run import ENERGON, MODULES
from tests.compat.programs.run import OLDER as OLDER_MODULE
from tests.ranks import Forked, finished

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

PROGRAMS = {
    "webdataset": HERE / "programs" / "webdataset.json",
    "megatron.energon": HERE / "programs" / "energon" / "recorded.json",
}
"""What the programs for each package give with it."""
PINNED = ("0.2.86", "0.2.111")
"""Earlier releases of webdataset that programs pin: their names, and the programs in `patterns`."""
NAMES = {
    package: HERE / "names" / f"{package}.json"
    for package in [*PROGRAMS, *(f"webdataset-{version}" for version in PINNED)]
}
"""The public names of each package."""
OLDER = NAMES["megatron.energon"].with_suffix(".older.json")
"""Those of older versions of Megatron-Energon, as far as they differ."""
OLDER_VERSIONS = ("5.0.0", "5.2.0", "6.0.0")
PATTERNS = {version: HERE / "programs" / f"patterns-{version}.json" for version in PINNED}
"""What the programs in `patterns` give with earlier releases."""
OLDER_PROGRAMS = ("5.2.0", PROGRAMS["megatron.energon"].with_name("recorded-5.2.0.json"))
"""A version of Megatron-Energon, and what the programs in `older` give with it."""
DIGESTS = HERE / "digests.json"
"""What `digests` returned when the programs were recorded."""


def digests() -> dict[str, str]:
    """Return digests of the programs, of each without its white space, and of all records."""
    paths = [*HERE.glob("programs/**/*.py"), *HERE.glob("*/**/*.json")]
    return {
        path.relative_to(HERE).as_posix(): sha256(
            "".join(path.read_text().split()).encode()
        ).hexdigest()[:16]
        for path in sorted(paths)
    }


@cache
def peers_python() -> str:
    """Return an interpreter that has the peers, which the script of the benchmarks installs."""
    python = _folder() / "bin" / "python"
    check = [python, "-c", "import webdataset, zmq, megatron.energon"]
    with locked(_folder().with_suffix(".lock"), deletes=True):  # other processes run tests, too
        if not python.exists() or subprocess.run(check, capture_output=True).returncode != 0:
            _install()
    return str(python)


def run_programs(
    python: str, package: str, module: str = "", *, folder: Path | None = None
) -> dict[str, Any]:
    """Return the results of the programs for a package, by name.

    Args:
        python: The interpreter.
        package: What they import: "webdataset", "megatron.energon" or "energon.webdataset".
        module: Which of their modules; "" for all.
        folder: The release of the package that is in this folder; None for the installed one.
    """
    command = [python, HERE / "programs" / "run.py", package, module]
    results: dict[str, Any] = json.loads(_printed(command, folder))
    return results


def run_programs_here(package: str, module: str) -> dict[str, Any]:
    """Return the results of the programs of a module with our package, by name."""
    folder = HERE / "programs"
    words = [str(folder / "run.py"), package, module]
    (printed,) = finished([Forked(words, _environment(), imports=())])
    results: dict[str, Any] = json.loads(printed)
    (source,) = (path.read_text() for path in folder.rglob(f"{module}.py") if is_for(path, package))
    assert {*results} == {*re.findall(r"^(?:def )?(check_\w+)", source, re.MULTILINE)}
    return results


def is_for(path: Path, package: str) -> bool:
    """Return whether a module of programs is for a package."""
    return (path.parent.name == "energon") == (package == "megatron.energon")


def program_modules(package: str) -> list[str]:
    """Return the modules that the programs for a package are in."""
    return ENERGON if package == "megatron.energon" else MODULES


def pinned_folder(version: str, package: str = "webdataset") -> Path:
    """Return the folder of an earlier release of a package."""
    return _folder() / f"{package}-{version}"


def list_older_names(python: str) -> list[dict[str, Any]]:
    """Return the names of older versions of Megatron-Energon, as far as they differ."""
    newest = listed("megatron.energon")
    older = [f"megatron.energon-{version}" for version in OLDER_VERSIONS]
    return [changed_since(json.loads(list_names(python, each)), newest) for each in older]


def list_names(python: str, recorded: str) -> str:
    """Return the public names of a package of `NAMES`, and the underscored ones that are listed."""
    package, _, version = recorded.partition("-")
    path = NAMES.get(recorded, NAMES[package])
    modules = json.loads((path if path.exists() else NAMES[package]).read_text())["modules"]
    filters = modules.get("webdataset.filters", ())
    also = ",".join(name for name in filters if name.startswith("_"))
    options = ["--also", f"webdataset.filters:{also}"] if also else []
    command = [python, "-W", "ignore", HERE / "list_names.py", package, *options]
    return _printed(command, _folder() / recorded if version else None)


def _folder() -> Path:
    return Path(os.environ.get("ENERGON_PEERS", ROOT / ".venv-peers"))


def _install() -> None:
    subprocess.run([ROOT / "benchmarks" / "peers.sh", _folder()], check=True, timeout=1800)


def _environment() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if not n.startswith(("WDS_", "ENERGON_"))}


def _printed(command: list[str | Path], folder: Path | None = None) -> str:
    environment = _environment()
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560)
    assert done.returncode == 0, done.stderr
    return done.stdout


def record() -> None:
    """Install the peers, and write down which names they have and what programs give with them."""
    _install()
    python = str(_folder() / "bin" / "python")
    for package, path in NAMES.items():
        path.write_text(list_names(python, package))
    OLDER.write_text(json.dumps(list_older_names(python)) + "\n")
    for package, path in PROGRAMS.items():
        found: dict[str, Any] = {}
        for module in program_modules(package):
            found |= run_programs(python, package, module)
        path.write_text(json.dumps(found, indent=1) + "\n")
    for version, path in PATTERNS.items():
        found = run_programs(python, "webdataset", "patterns", folder=pinned_folder(version))
        path.write_text(json.dumps(found, indent=1) + "\n")
    older, path = OLDER_PROGRAMS
    folder = pinned_folder(older, "megatron.energon")
    found = run_programs(python, "megatron.energon", OLDER_MODULE, folder=folder)
    path.write_text(json.dumps(found, indent=1) + "\n")
    DIGESTS.write_text(json.dumps(digests(), indent=1) + "\n")


if __name__ == "__main__":
    record()
