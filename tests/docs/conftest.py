from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from energon.cli.demo import write_demo

ROOT = Path(__file__).parents[2]


def load_demo() -> ModuleType:
    """Return `examples/demo.py` as a module."""
    spec = importlib.util.spec_from_file_location("energon_demo", ROOT / "examples/demo.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # dataclasses look for their module there
    spec.loader.exec_module(example)
    return example


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """The folder that `energon demo` writes."""
    folder = tmp_path_factory.mktemp("docs") / "demo"
    write_demo(folder)
    return folder
