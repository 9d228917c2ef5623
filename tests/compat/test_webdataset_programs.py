"""Programs for webdataset give here what they give there.

`programs/webdataset.json` is what they gave there; `programs/run.py` says how it was made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.names import listed
from tests.compat.peers import peers_python

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "programs" / "webdataset.json").read_text())


def run(python, package):
    script = HERE / "programs" / "run.py"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("WDS_", "ENERGON_"))}
    done = subprocess.run(
        [python, script, package], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def different(found):
    names = {*found, *RECORDED}
    return {n: (RECORDED.get(n), found.get(n)) for n in names if RECORDED.get(n) != found.get(n)}


def test_programs_give_what_they_give_with_webdataset():
    assert different(run(sys.executable, "energon.webdataset")) == {}


def test_no_program_has_failed():
    assert [name for name, found in RECORDED.items() if str(found).startswith("failed")] == []
    assert len(RECORDED) > 180


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_installed_webdataset_gives_what_was_recorded():
    assert different(run(peers_python(), "webdataset")) == {}


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
