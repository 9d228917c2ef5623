"""Programs for webdataset and Megatron-Energon give here what they give there.

What they gave there is recorded, see `peers.py`. Of what is in random order, sets and counts are
compared.
"""

from __future__ import annotations

import json

import pytest

from tests.compat.names import listed, listed_older
from tests.compat.peers import (
    DIGESTS,
    NAMES,
    OLDER_PROGRAMS,
    PATTERNS,
    PROGRAMS,
    ROOT,
    digests,
    list_names,
    list_older_names,
    peers_python,
    pinned_folder,
    program_modules,
    run_programs,
    run_programs_here,
)
from tests.compat.programs.run import ENERGON, OLDER
from tests.effort import FULL

RECORDED = {package: json.loads(path.read_text()) for package, path in PROGRAMS.items()}
PINNED_PATTERNS = {version: json.loads(path.read_text()) for version, path in PATTERNS.items()}
# Programs that give something else here, each with the beginning of its row in docs/webdataset.md,
# and what it gives.
DIFFERENT_PIPELINES = {
    "check_two_lists_of_resampled_shards": ("two `ResampledShards`", [False, True, False]),
    "check_fields_of_rare_formats": (
        "fields named h5",
        dict.fromkeys(
            ["h5", "hdf", "grib", "bufr", "fits", "mpg", "mpeg", "wmf", "emf", "eps", "ps"],
            "bytes",
        ),
    ),
    "check_ranks_without_a_splitter": (
        "ranks without `nodesplitter`",
        [[f"{n:04}" for n in range(20) if n // 5 % 2 == rank] for rank in range(2)],
    ),
    "check_a_folder_with_a_slash": ("folders with a slash", [["a"], ["0.tar"]]),
    "check_an_epoch_of_nothing": ("`with_epoch(0)`", "ValueError"),
    **{
        name: ("`tar_file_expander` between two shards", PINNED_PATTERNS["0.2.86"][name])
        for name in ("check_a_grouping_of_the_program", "check_files_without_a_marker")
    },
}
TAKE_LONG = ("patterns", "epochs")
"""Modules whose programs start processes."""
# The same for Megatron-Energon, by module, each with its entry in docs/migration.md.
DIFFERENT = {
    "parts": {"check_preparing_with_answers": "Answers to the questions of `energon prepare`"},
    "documents": {"check_joins_that_do_not_match": "Excluded samples of joined datasets"},
}


def different(package, found):
    """Return what programs give that is not what was recorded, by name."""
    recorded = RECORDED[package]
    return {n: (recorded.get(n), found[n]) for n in found if recorded.get(n) != found[n]}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] if module in TAKE_LONG else [])
        for module in program_modules("webdataset")
    ],
)
def test_programs_for_webdataset_give_what_they_give_there(module):
    recorded = RECORDED["webdataset"]
    results = run_programs_here("energon.webdataset", module)
    differing = {name: here for name, here in results.items() if recorded.get(name) != here}
    expected = {n: result for n, (_, result) in DIFFERENT_PIPELINES.items() if n in results}
    assert differing == expected
    if module == "patterns":
        # The one that differs between releases does as in 0.2.86, which most programs pin.
        assert results == PINNED_PATTERNS["0.2.86"]
        newer = PINNED_PATTERNS["0.2.111"]
        changed = {name for name in results if results[name] != newer[name]}
        assert changed == {"check_a_grouping_of_the_program", "check_files_without_a_marker"}


@pytest.mark.slow
def test_programs_for_an_older_version_of_megatron_energon_give_what_they_give_there():
    _, path = OLDER_PROGRAMS
    results = run_programs_here("megatron.energon", OLDER)
    assert results == json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", ENERGON)
def test_programs_for_megatron_energon_give_what_they_give_there(module):
    found = different("megatron.energon", run_programs_here("megatron.energon", module))
    assert set(found) == set(DIFFERENT.get(module, ())), found


def test_programs_that_give_something_else_are_in_the_documentation():
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = [row for programs in DIFFERENT.values() for row in programs.values()]
    assert [each for each in rows if f"- **{each}**" not in text] == []
    text = (ROOT / "docs" / "webdataset.md").read_text()
    rows = [row for row, _ in DIFFERENT_PIPELINES.values()]
    assert [each for each in rows if f"\n| {each}" not in text] == []


def test_no_program_has_failed_there():
    every = {**RECORDED["webdataset"], **RECORDED["megatron.energon"]}
    failed = {name for name, found in every.items() if str(found).startswith("failed")}
    assert failed == {"check_a_grouping_of_the_program"}, "its `fname` is of earlier releases"
    assert len(RECORDED["webdataset"]) >= 241
    assert len(RECORDED["megatron.energon"]) >= 223


def test_programs_have_not_changed_since_they_were_recorded():
    assert digests() == json.loads(DIGESTS.read_text()), "run `make record`"


by_a_release = pytest.mark.skipif(
    not FULL, reason="a release installs the peers, and tries all records again"
)


@pytest.mark.slow
@by_a_release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("package", "module"),
    [(package, module) for package in PROGRAMS for module in program_modules(package)],
)
def test_the_installed_package_gives_what_was_recorded(package, module):
    assert different(package, run_programs(peers_python(), package, module)) == {}


@pytest.mark.slow
@by_a_release
@pytest.mark.timeout(2400)
def test_the_older_version_of_megatron_energon_gives_what_was_recorded():
    version, path = OLDER_PROGRAMS
    folder, python = pinned_folder(version, "megatron.energon"), peers_python()
    results = run_programs(python, "megatron.energon", OLDER, folder=folder)
    assert results == json.loads(path.read_text())


@pytest.mark.slow
@by_a_release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("package", list(NAMES))
def test_the_installed_package_has_the_names_that_are_listed(package):
    assert json.loads(list_names(peers_python(), package)) == listed(package)


@pytest.mark.slow
@by_a_release
@pytest.mark.timeout(2400)
def test_older_versions_of_megatron_energon_have_the_names_that_are_listed():
    assert list_older_names(peers_python()) == listed_older()
