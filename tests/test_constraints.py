"""What constraints.txt pins can be installed everywhere, and what the demo installs is little."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_pinned_versions_support_the_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    too_new = {}
    for name, version in pins:
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        needed = SpecifierSet(found.metadata.get("Requires-Python") or "")
        if found.version == version and not needed.contains(oldest):
            too_new[f"{name}=={version}"] = str(needed)
    assert len(pins) > 100
    assert not too_new


def test_the_demo_installs_few_packages():
    (extras,) = (
        line.split()[1]
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.strip().startswith("@.ci/install") and line.split()[1] != "dev"
    )
    found: set[str] = set()
    open_requirements = [Requirement(f"energon-loader[{extras}]")]
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        # The CPU build of torch needs no packages of CUDA, see .ci/install.
        is_cuda = name.startswith(("nvidia-", "cuda-")) or name == "triton"
        if is_cuda or (name in found and not requirement.extras):
            continue
        found.add(name)
        for line in distribution(requirement.name).requires or ():
            needed = Requirement(line)
            groups = requirement.extras or {""}
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in groups):
                open_requirements.append(needed)
    assert {"torch", "numpy", "simplejpeg"} <= found
    assert len(found - {"energon-loader"}) < 25, sorted(found)


def test_what_is_tried_with_the_oldest_packages_exists():
    named = re.findall(r"tests/[\w/]+(?:\.py)?", (ROOT / ".ci/lowest").read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
