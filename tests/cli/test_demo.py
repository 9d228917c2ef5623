"""`energon demo`: the datasets, the program, and the folders that it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.commands import ok, run


@pytest.mark.slow
def test_the_program_runs_and_every_suggested_command_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run("demo").output
    suggested = [line.split() for line in output.splitlines() if line.startswith("  ")]
    assert [words[:2] for words in suggested] == [
        ["python", "demo/train.py"],
        *(["energon", name] for name in ("info", "plan", "view")),
    ]
    done = subprocess.run(
        [sys.executable, "demo/train.py"], capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2", "3"]
    for words in suggested[1:3]:
        ok(*words[1:])


@pytest.mark.slow
def test_only_files_of_an_earlier_demo_are_replaced(tmp_path):
    own = tmp_path / "shapes/own.txt"
    own.parent.mkdir()
    own.write_text("mine")
    refused = run("demo", tmp_path)
    assert refused.exit_code == 2
    assert "shapes is not of a demo; name another folder" in refused.output.replace("\n", " ")
    assert own.exists()
    ok("demo", tmp_path / "demo")
    (tmp_path / "demo/shapes/old.txt").write_text("old")
    (tmp_path / "demo/mix.yaml").write_text("mine")
    assert run("demo", tmp_path / "demo", "--quiet").output == ""
    assert not (tmp_path / "demo/shapes/old.txt").exists()
    assert (tmp_path / "demo/mix.yaml").exists()


@pytest.mark.parametrize("folder", ["s3://bucket/demo", "http://127.0.0.1:1/demo"])
def test_addresses_are_refused(folder):
    refused = run("demo", folder)
    assert refused.exit_code == 2
    assert "expected a local folder" in refused.output
