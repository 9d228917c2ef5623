"""Fragments of changes become a section of the changelog, see `.ci/changes`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def release(folder, version, changelog, **fragments):
    (folder / ".ci").mkdir()
    (folder / "changes").mkdir()
    shutil.copy(ROOT / ".ci/changes", folder / ".ci")
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "changes/README.md").write_text("How to write one.\n")
    for name, text in fragments.items():
        (folder / f"changes/{name}.md").write_text(text)
    command = [sys.executable, str(folder / ".ci/changes"), version]
    subprocess.run(command, check=True, capture_output=True)
    assert [path.name for path in (folder / "changes").iterdir()] == ["README.md"]
    text = (folder / "CHANGELOG.md").read_text()
    return re.sub(r"\(\d{4}-\d\d-\d\d\)", "(today)", text, count=1)


def test_a_new_version_comes_before_the_older_ones(tmp_path):
    changelog = "# Changelog\n\n## 0.1.0 (2026-01-01)\n\nFirst.\n\n- Old.\n"
    found = release(tmp_path, "0.2.0", changelog, b="Second\nline.\n", a="First line.\n")
    assert found == (
        "# Changelog\n\n## 0.2.0 (today)\n\n- First line.\n- Second line.\n\n"
        "## 0.1.0 (2026-01-01)\n\nFirst.\n\n- Old.\n"
    )


def test_what_the_version_has_already_stays(tmp_path):
    changelog = (
        "# Changelog\n\n## 0.2.0 (unreleased)\n\nMore.\n\n- Known.\n\n## 0.1.0 (x)\n\n- Old.\n"
    )
    found = release(tmp_path, "0.2.0", changelog, new="New.\n")
    assert found == (
        "# Changelog\n\n## 0.2.0 (today)\n\nMore.\n\n- New.\n- Known.\n\n## 0.1.0 (x)\n\n- Old.\n"
    )


def test_fragments_are_sentences():
    for path in (ROOT / "changes").glob("*.md"):
        text = path.read_text().strip()
        assert text.endswith("."), path
        assert path.name == "README.md" or text[0].isupper() or text[0] == "`", path
