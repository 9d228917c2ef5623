"""The wheel: what is in it, what it needs, and how it gets on with Megatron-Energon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

from tests.datasets import write_shard
from tests.shared import made_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
THEIRS = "megatron-energon==7.4.1"
OFFLINE = ("No matching distribution found", "Failed to establish a new connection")

PROGRAM = """
import importlib.metadata
import sys

version = importlib.metadata.version("megatron-energon")
import energon
from energon import WorkerConfig, get_loader, get_train_dataset
from megatron.energon.flavors import CaptioningSample

assert importlib.metadata.version("megatron-energon") == version, version
for name in energon.__all__:
    getattr(energon, name)
config = WorkerConfig(rank=0, world_size=1, num_workers=1)
dataset = get_train_dataset("ds", worker_config=config, batch_size=2, repeat=False)
keys = [key for batch in get_loader(dataset) for key in batch["__key__"]]
assert sorted(keys) == ["a", "b", "c", "d"], keys
assert "torch" not in sys.modules
"""


def pip(python: Path | str, *arguments: str) -> None:
    """Run pip; without a network, skip the test, except in CI."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "CI" not in os.environ and any(sign in done.stderr for sign in OFFLINE):
        pytest.skip(f"needs a package index: {done.stderr.splitlines()[-1]}")
    assert not done.returncode, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    (path,) = made_once(tmp_path_factory, "wheel", build_wheel).glob("*.whl")
    return path


def build_wheel(folder: Path) -> None:
    tree = folder / "tree"  # where a build may leave files
    stubs = shutil.ignore_patterns("__pycache__", "*.pyi")
    shutil.copytree(ROOT / "src/megatron", tree / "src/megatron", ignore=stubs)
    for name in ("src/energon", "src/energon_loader.pth", *FILES):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    pip(sys.executable, "wheel", "--no-deps", "-w", str(folder), str(tree))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment that has the wheel, and the packages of this one.

    `.ci/packages` installs the wheel where nothing but what it depends on is.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not any(ours in path.name for ours in ("energon", "megatron")):
            (packages / path.name).symlink_to(path)
    pip(folder / "bin/python", "install", "--no-compile", "--no-deps", str(wheel))
    return folder


def run(environment: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment with no variables but those that every shell has."""
    return subprocess.run(
        [environment / "bin" / command[0], *command[1:]],
        cwd=cwd,
        env={"PATH": f"{environment}/bin:{os.defpath}", "HOME": str(cwd)},
        capture_output=True,
        text=True,
    )


def test_a_wheel_has_all_modules_their_types_and_two_commands(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
        scripts = ConfigParser()
        scripts.read_string(archive.read(about.replace("METADATA", "entry_points.txt")).decode())
    source = ROOT / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert modules <= names
    assert {"energon/py.typed", "energon/__init__.pyi", "megatron/energon/py.typed"} <= names
    assert {"megatron/energon/flavors/__init__.pyi", "energon/webdataset/__init__.pyi"} <= names
    assert "energon/metadataset/schema.json" in names
    assert "megatron/__init__.py" not in names  # other distributions have packages there, too
    assert not [name for name in names if name.startswith(("tests", "docs", "examples"))]
    assert metadata["Author"] == "The energon developers"
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "webdataset" in metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(scripts["console_scripts"]) == {"energon", "energon-loader"}
    assert len(set(scripts["console_scripts"].values())) == 1


def test_a_wheel_runs_without_its_source(environment, tmp_path):
    for shard, keys in enumerate(("ab", "cd")):
        write_shard(tmp_path / f"ds/{shard}.tar", [(key, {"txt": b"x"}) for key in keys])
    options = ("--non-interactive", "--split-ratio", "1", "--sample-type", "CrudeWebdataset")
    done = run(environment, "energon", "prepare", "ds", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(environment, "python", "-W", "error", "-c", PROGRAM, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for command in (["energon-loader"], ["python", "-m", "energon"]):
        done = run(environment, *command, "info", "ds", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def lines(environment: Path, *command: str, cwd: Path) -> list[str]:
    """Return what a program says about the two distributions."""
    said = run(environment, *command, cwd=cwd).stderr
    return [line for line in said.splitlines() if "energon-loader" in line and "pip" in line]


SAYING = (
    ("python", "-c", "import energon"),
    ("python", "-c", "import megatron.energon"),
    ("python", "-m", "energon", "--version"),
    ("energon", "--version"),
    ("energon-loader", "--version"),
)


@pytest.mark.parametrize("last", ["ours", "theirs"])
def test_megatron_energon_beside_it_is_told_and_the_command_that_is_told_repairs(
    last, wheel, environment, tmp_path
):
    python = environment / "bin/python"
    pip(python, "uninstall", "-y", "energon-loader")
    for each in (THEIRS, str(wheel)) if last == "ours" else (str(wheel), THEIRS):
        pip(python, "install", "--no-compile", "--no-deps", each)
    owner = {"ours": "energon-loader", "theirs": "megatron-energon"}[last]
    for command in SAYING:
        (line,) = lines(environment, *command, cwd=tmp_path)
        assert f"megatron/energon/__init__.py belongs to {owner} and" in line
        assert f"bin/energon belongs to {owner};" in line
    done = run(environment, "energon-loader", "--version", cwd=tmp_path)
    assert done.stdout.startswith("energon, version")
    repair = line.partition("To keep energon-loader: ")[2]
    remove, _, put_back = repair.partition(" && ")
    pip(python, *remove.split()[1:])
    # Now what both have had is gone, whoever was last.
    for command in SAYING[:3]:
        (line,) = lines(environment, *command, cwd=tmp_path)
        assert "lost `megatron.energon` and the command `energon`" in line
        assert line.endswith(put_back)
    pip(python, *put_back.split()[1:])
    for command in SAYING:
        done = run(environment, *command, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_is_wrong_is_told_once_by_a_program_and_all_that_it_starts(environment, tmp_path):
    python = environment / "bin/python"
    pip(python, "install", "--no-compile", "--no-deps", THEIRS)
    program = (
        "import subprocess, sys, energon\n"
        "subprocess.run([sys.executable, '-c', 'import energon'], check=True)"
    )
    assert len(lines(environment, "python", "-c", program, cwd=tmp_path)) == 1
