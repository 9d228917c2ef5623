"""Every example of the documentation runs and prints what it shows, see `page.py`."""

from __future__ import annotations

import os
import shutil
import sys
import types

import pytest

from energon.io.files import forget_stores
from tests.docs.conftest import ROOT
from tests.docs.page import run_page

PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
)

FIRST_READ = ("README.md", "docs/getting_started.md", "docs/index.md")
"""Pages that are tried in every run of the tests; the others are run as slow ones."""
STARTS_TRAINERS = (
    "docs/cluster.md",
    "docs/finetune_vlm.md",
    "docs/plan.md",
    "docs/pretrain_gpt.md",
    "docs/save_and_resume.md",
    "docs/train_clip.md",
    "docs/trainers.md",
    "docs/webdataset.md",
)
"""Pages that run trainers, whose processes are forked from one that imports torch first."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            # On a machine that is busy with others their imports take minutes.
            marks=[
                *([pytest.mark.timeout(900)] if name in STARTS_TRAINERS else []),
                *([] if name in FIRST_READ else [pytest.mark.slow]),
            ],
        )
        for name in PAGES
    ],
)
def test_the_examples_of_a_page_run(name, demo, tmp_path, monkeypatch):
    text = (ROOT / name).read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo, tmp_path / "demo")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # What an example sets in the environment is not for the tests that come after it.
    before = dict(os.environ)
    try:
        run_page(name, text, main)
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_stores()
