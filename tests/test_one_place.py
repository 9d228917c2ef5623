"""What is done in one place only, by the calls that do it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import energon

ROOT = Path(energon.__file__).parent
PLACES = {
    ("os.replace", "os.rename", "os.renames"): {
        "io/atomic.py": "where files and folders get their final names",
        "webdataset/shardlists.py": "a process claims a file by renaming it",
    },
    ("status.st_atime_ns",): {"io/disk_cache.py": "which entries of a disk cache go first"},
    ("fcntl.flock", "fcntl.lockf"): {"io/atomic.py": "the locks"},
}


def calls_in(path):
    """Return the functions of modules that a file calls or passes on, such as `os.replace`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                yield f"{module}.{name}"
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{each.name}" for each in names)


@pytest.fixture(scope="module")
def calls():
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): set(calls_in(path)) for path in paths}


@pytest.mark.parametrize("functions", PLACES, ids=lambda functions: functions[0])
def test_only_one_place_calls(functions, calls):
    found = {path for path, names in calls.items() if names & {*functions}}
    assert found == {*PLACES[functions]}


def test_what_a_sample_of_a_stream_is_stands_in_one_file():
    declaration = "\nStreamSample = "
    found = [path for path in ROOT.rglob("*.py") if declaration in path.read_text()]
    assert found == [ROOT / "formats/tar/parser.py"]
