"""Every example of the documentation runs and prints what it shows, see `page.py`."""

from __future__ import annotations

import shutil
import sys
import types

import pytest

from tests.docs.conftest import ROOT
from tests.docs.page import run_page

PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
)


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name, demo, tmp_path, monkeypatch):
    text = (ROOT / name).read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo, tmp_path / "demo")
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    run_page(name, text, main)
