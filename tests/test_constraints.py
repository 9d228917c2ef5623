"""What constraints.txt pins can be installed with every Python that energon supports."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.specifiers import SpecifierSet

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
