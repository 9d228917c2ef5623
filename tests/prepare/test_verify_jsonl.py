from __future__ import annotations

import json

import pytest

from energon.errors import DatasetNotFoundError
from energon.prepare.dataset import Indexing
from energon.prepare.jsonl import prepare_jsonl
from energon.prepare.verify.dataset import repair_dataset, verify_dataset
from energon.sources.tables.jsonl import JsonlSource
from tests.commands import ok, run


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(10)))
    prepare_jsonl(path, split_ratio={"train": 8, "val": 2})
    return path


def kinds(path, depth="headers"):
    return [problem.kind for problem in verify_dataset(path, depth=depth).problems]


def test_nothing_is_wrong_with_what_was_just_prepared(lines):
    for depth in ("quick", "headers", "content"):
        report = verify_dataset(lines, depth=depth)
        assert (report.problems, report.num_samples, report.num_shards) == ([], 10, 1)


def grow(path):
    path.write_text(path.read_text() + '{"n": 10}\n')


def shift(path):
    """Let a line begin elsewhere in a file of the same size."""
    path.write_text(path.read_text().replace('{"n": 1}\n{"n": 2}', '{"n": 123}\n{"n":}'))


def lose_the_index(path):
    path.with_name("x.jsonl.idx").unlink()


def cut_the_index(path):
    index = path.with_name("x.jsonl.idx")
    index.write_bytes(index.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (grow, "index-stale"),
        (shift, "index-stale"),
        (lose_the_index, "index-missing"),
        (cut_the_index, "index-damaged"),
    ],
)
def test_an_index_that_does_not_fit_is_found_and_written_anew(lines, harm, kind):
    harm(lines)
    assert kinds(lines) == [kind]
    done = repair_dataset(lines, indexing=Indexing())
    assert (done.indexed, done.after.problems) == (["x.jsonl"], [])


def test_lines_that_are_no_json_are_found_and_cannot_be_repaired(lines):
    lines.write_text(lines.read_text().replace('{"n": 4}', '{"n" :4'))
    (problem,) = verify_dataset(lines, depth="quick").problems
    assert (problem.kind, problem.repairable) == ("content-changed", False)
    assert f"again, unless `energon verify {lines}` finds damage" in problem.message
    lines.write_text(lines.read_text().replace('{"n" :4', '{"n" 4 }'))
    assert kinds(lines) == []
    (problem,) = verify_dataset(lines, depth="content").problems
    assert (problem.kind, problem.key, problem.repairable) == ("content-damaged", "4", False)
    lines.write_text(lines.read_text().replace('{"n" 4 }', "[1,2,3]"))
    for drop in (False, True):
        (problem,) = verify_dataset(lines).problems
        assert (problem.kind, problem.repairable) == ("content-damaged", False)
        assert "x.jsonl:5: expected a JSON object" in problem.message
        assert "; correct or remove the line; `energon repair` cannot" in problem.message
        done = repair_dataset(lines, drop=drop, indexing=Indexing())
        assert (done.indexed, done.after.problems) == ([], [problem])
    lines.write_text(lines.read_text().replace("[1,2,3]\n", ""))
    prepare_jsonl(lines, split_ratio={"train": 1})
    assert kinds(lines, "content") == []


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_damaged_lines_are_quarantined_and_then_left_out(tmp_path, command):
    """Also those that are too many to be reported one by one."""
    lines, listed = tmp_path / "y.jsonl", tmp_path / "lost"
    lines.write_text("{}\n" + "{no JSON}\n" * 150 + "{}\n")
    prepare_jsonl(lines)
    assert run(command, lines, "--checksum", "--quarantine", listed).exit_code == 1
    ok("prepare", lines, "--exclude-from", listed)
    assert len(JsonlSource(lines)) == 2


def test_repair_quarantines_what_is_damaged_in_the_new_index(lines):
    lines.write_text(lines.read_text() + "{no JSON}\n")
    listed = lines.with_name("lost")
    run("repair", lines, "--checksum", "--quarantine", listed)
    assert [json.loads(line)["key"] for line in listed.read_text().splitlines()] == ["10"]


def test_dropping_shards_is_noted_to_have_no_effect(lines):
    lines.write_text(lines.read_text() + "[1]\n")
    found = run("repair", lines)
    done = run("repair", lines, "--drop")
    note = f"note: --drop had no effect: {lines} is a JSONL file, without shards\n"
    assert note in done.output
    assert (done.exit_code, done.output.replace(note, "")) == (1, found.output)
    about = json.loads(run("repair", lines, "--drop", "--json").output)
    assert [len(about[time]["notes"]) for time in ("before", "after")] == [0, 1]


def test_splits_are_checked(lines):
    splits = lines.with_name("x.jsonl.split.yaml")
    splits.write_text("split_parts: {train: [0, 8], val: [8, 11]}")
    (problem,) = verify_dataset(lines).problems
    assert problem.kind == "split-range"
    assert "'val'" in problem.message
    splits.write_text("[]")
    assert kinds(lines) == ["split-damaged"]


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="no such file"):
        verify_dataset(tmp_path / "no.jsonl")
