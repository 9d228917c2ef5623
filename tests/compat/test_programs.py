"""Programs for webdataset and Megatron-Energon give here what they give there.

What they gave there is recorded, see `peers.py`. Of what is in random order, sets and counts are
compared.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.compat.names import listed
from tests.compat.peers import NAMES, PROGRAMS, ROOT, list_names, peers_python, run_programs

RECORDED = {package: json.loads(path.read_text()) for package, path in PROGRAMS.items()}
# Programs that give something else here, by a row of docs/differences.md.
DIFFERENT = {"check_preparing_with_answers": "answers to the questions of `energon prepare`"}


def run(python, package):
    return json.loads(run_programs(python, package))


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
@pytest.mark.parametrize("package", list(PROGRAMS))
def test_the_installed_package_gives_what_was_recorded(package):
    assert different(package, run(peers_python(), package)) == {}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("package", list(NAMES))
def test_the_installed_package_has_the_names_that_are_listed(package):
    assert json.loads(list_names(peers_python(), package)) == listed(package)
