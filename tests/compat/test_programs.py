"""Programs for webdataset and Megatron-Energon give here what they give there.

`programs/webdataset.json` and `programs/energon/recorded.json` are what they gave there;
`programs/run.py` says how they were made. Of what is in random order, sets and counts are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.names import listed
from tests.compat.peers import ROOT, peers_python

HERE = Path(__file__).parent
FILES = {"webdataset": "webdataset.json", "megatron.energon": "energon/recorded.json"}
RECORDED = {
    package: json.loads((HERE / "programs" / file).read_text()) for package, file in FILES.items()
}
# Programs that give something else here, by a row of docs/differences.md.
DIFFERENT = {"check_preparing_with_answers": "answers to the questions of `energon prepare`"}


def run(python, package):
    script = HERE / "programs" / "run.py"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("WDS_", "ENERGON_"))}
    done = subprocess.run(
        [python, script, package], capture_output=True, text=True, env=environment, timeout=560
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def different(package, found):
    recorded = RECORDED[package]
    names = {*found, *recorded}
    return {n: (recorded.get(n), found.get(n)) for n in names if recorded.get(n) != found.get(n)}


@pytest.mark.slow
def test_programs_for_webdataset_give_what_they_give_there():
    assert different("webdataset", run(sys.executable, "energon.webdataset")) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_for_megatron_energon_give_what_they_give_there():
    found = different("megatron.energon", run(sys.executable, "megatron.energon"))
    assert set(found) == set(DIFFERENT), found


def test_programs_that_give_something_else_are_in_the_documentation():
    text = (ROOT / "docs" / "differences.md").read_text()
    assert [each for each in DIFFERENT.values() if f"| {each}" not in text] == []


def test_no_program_has_failed_there():
    every = {**RECORDED["webdataset"], **RECORDED["megatron.energon"]}
    assert [name for name, found in every.items() if str(found).startswith("failed")] == []
    assert len(RECORDED["webdataset"]) > 180
    assert len(RECORDED["megatron.energon"]) > 70


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("package", list(FILES))
def test_the_installed_package_gives_what_was_recorded(package):
    assert different(package, run(peers_python(), package)) == {}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_installed_webdataset_has_the_names_that_are_listed():
    recorded = listed("webdataset")
    underscored = [n for n in recorded["modules"]["webdataset.filters"] if n.startswith("_")]
    also = f"webdataset.filters:{','.join(underscored)}"
    script = HERE / "list_names.py"
    done = subprocess.run(
        [peers_python(), script, "webdataset", "--also", also], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == recorded
