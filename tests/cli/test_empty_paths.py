"""An empty path, as shells make of variables that are not set, is not the working directory."""

from __future__ import annotations

import pytest

from tests.commands import run
from tests.datasets import make_captions

COMMANDS = {
    "prepare": ("--split-ratio", "1", "--non-interactive", "--force-overwrite"),
    "prepare-media": ("--media-metadata-by-extension",),
    "pack": ("out",),
    **dict.fromkeys(("info", "lint", "plan", "preview", "index", "verify", "repair"), ()),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_path_is_refused(tmp_path, monkeypatch, command):
    root = make_captions(tmp_path / "ds", [2])
    monkeypatch.chdir(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    done = run(command, "", *COMMANDS[command])
    assert done.exit_code == 2
    assert "path" in done.output
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@pytest.mark.parametrize("command", ["cat", "split"])
def test_an_empty_output_is_refused(tmp_path, command):
    root = make_captions(tmp_path / "ds", [2])
    done = run("tar", command, *root.rglob("*.tar"), "-o", "")
    assert done.exit_code == 2
    assert "the output has an empty path" in done.output
