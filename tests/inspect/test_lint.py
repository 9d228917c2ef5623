from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

from energon.errors import DatasetNotFoundError, EmptyDatasetError
from energon.inspect.lint import lint_dataset, quarantine
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine
from energon.prepare.jsonl import prepare_jsonl
from energon.sources.webdataset import WebdatasetSource
from tests.commands import run
from tests.datasets import CRUDE, jpeg, make_captions, write_crude, write_shard

ALONE = Engine(num_workers=1)


def lint(*arguments):
    """Return what `energon lint` does in this process."""
    return run("lint", "--num-workers", 1, *arguments)


def make_damaged(root):
    """Two shards of two samples each, of which c has half an image."""
    write_shard(root / "0.tar", [("a", {"jpg": jpeg(0)}), ("b", {"jpg": jpeg(1)})])
    write_shard(root / "1.tar", [("c", {"jpg": jpeg(2)[:200]}), ("d", {"jpg": jpeg(3)})])
    prepare_dataset(root, **CRUDE)
    return root


def test_names_the_part_of_a_crude_sample_that_cannot_be_decoded(tmp_path):
    root = make_damaged(tmp_path / "ds")
    report = lint_dataset(root, engine=ALONE)
    assert [(each.shard, each.key, each.part) for each in report.findings] == [
        ("1.tar", "c", "jpg")
    ]


def test_notes_the_parts_that_only_some_crude_samples_have(tmp_path):
    root = tmp_path / "ds"
    samples = [(f"s{n}", {"txt": b"x", "json" if n % 3 else "cls": b"1"}) for n in range(9)]
    write_crude(root, samples)
    report = lint_dataset(root, engine=ALONE)
    assert report.ok
    assert report.to_json()["lacking"] == {str(root): {"cls": 6, "json": 3}}
    said = lint(root).output
    assert "some samples lack parts that others have: cls (missing from 6), json" in said


def test_prepare_leaves_out_what_lint_has_put_into_quarantine(tmp_path):
    root = make_damaged(tmp_path / "ds")
    quarantine(lint_dataset(root, engine=ALONE), tmp_path / "bad.jsonl")
    prepare_dataset(root, **CRUDE, exclude_from=[tmp_path / "bad.jsonl"])
    assert len(WebdatasetSource(root)) == 3
    assert lint_dataset(root, engine=ALONE).ok


DEADLY = """
import os, signal

def sample_loader(raw):
    if raw["__key__"] == "s3":
        os.kill(os.getpid(), signal.SIGSEGV)
    if raw["__key__"] == "s71":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"text": raw["txt"]}

def part_filter(part):
    return part == "txt"
"""


@pytest.mark.slow
def test_a_sample_that_kills_the_process_is_found_and_all_others_are_looked_at(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ENERGON_ALLOW", "code")
    samples = [(f"s{n}", {"txt": b""}) for n in range(100)]
    write_shard(tmp_path / "0.tar", samples)
    prepare_dataset(
        tmp_path, split_parts=["train:.*"], sample_type="TextSample", sample_loader=DEADLY
    )
    report = lint_dataset(tmp_path)
    assert report.num_samples == {"train": 100}
    assert [(each.shard, each.key) for each in report.findings] == [
        ("0.tar", "s3"),
        ("0.tar", "s71"),
    ]
    assert "died" in report.findings[0].reason


def test_names_the_shard_that_is_cut_off_once(tmp_path):
    root = make_captions(tmp_path / "ds", [40, 40], split_parts=["train:.*"])
    shard = root / "shards/001.tar"
    os.truncate(shard, 3000)
    report = lint_dataset(root, engine=ALONE)
    assert [(each.shard, each.key) for each in report.findings] == [("shards/001.tar", None)]
    assert report.num_samples == {"train": 80}


def test_a_shard_that_is_missing_is_named_and_the_others_are_looked_at(tmp_path):
    root = make_captions(tmp_path / "ds", [2, 3], split_parts=["train:.*"])
    shard = root / "shards/001.tar"
    shard.unlink()
    report = lint_dataset(root, engine=ALONE)
    assert {(each.shard, each.key) for each in report.findings} == {("shards/001.tar", None)}
    assert report.num_samples == {"train": 5}


def test_an_empty_split_of_a_dataset_is_no_problem(tmp_path):
    root = make_captions(tmp_path / "ds", [2], split_parts=["train:.*"])
    path = root / ".nv-meta/split.yaml"
    path.write_text(path.read_text().replace("exclude:", "  val: []\nexclude:"))
    report = lint_dataset(root, engine=ALONE)
    assert report.ok
    assert report.num_samples == {"train": 2, "val": 0}


def test_collects_all_that_is_wrong_with_a_metadataset_and_looks_at_the_rest(tmp_path):
    make_damaged(tmp_path / "a" / "ds")
    make_damaged(tmp_path / "b" / "ds")
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "splits:\n  train:\n    blend:\n      - path: a/ds\n      - path: b/ds\n"
        "  val: {path: a/ds}\n  test: {path: nowhere}\n"
    )
    report = lint_dataset(blend, engine=ALONE)
    assert report.num_samples == {"train": 8, "val": 0}
    keys = [(each.split, each.key) for each in report.findings]
    assert keys == [("test", None), ("val", None), ("train", "c"), ("train", "c")]
    assert "nowhere does not exist" in report.findings[0].reason
    quarantine(report, tmp_path / "bad")
    lines = [json.loads(line) for line in (tmp_path / "bad/ds.jsonl").read_text().splitlines()]
    assert {(line["dataset"], line["key"]) for line in lines} == {
        (str(tmp_path / name / "ds"), "c") for name in "ab"
    }


def test_a_document_that_breaks_the_grammar_is_said_in_full(tmp_path):
    (tmp_path / "blend.yaml").write_text("splits:\n  train: {paht: x}\n  val: {path: 3}\n")
    result = lint(tmp_path / "blend.yaml")
    assert result.exit_code == 2
    assert "blend.yaml:2" in result.output
    assert "blend.yaml:3" in result.output


@pytest.mark.parametrize("damaged", [False, True])
def test_the_exit_code_and_the_json_say_whether_all_is_well(tmp_path, damaged):
    make = make_damaged if damaged else (lambda root: make_captions(root, [2]))
    root = make(tmp_path / "ds")
    result = lint(root, "--json", "--quarantine", tmp_path / "bad")
    about = json.loads(result.stdout)
    assert result.exit_code == int(damaged)
    assert about["ok"] is not damaged
    assert [problem["key"] for problem in about["problems"]] == ["c"] * damaged
    assert len((tmp_path / "bad").read_text().splitlines()) == int(damaged)


def test_pickled_parts_are_counted_and_not_unpickled(tmp_path, monkeypatch):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    write_shard(tmp_path / "0.tar", [("a", {"pkl": b"cos\nsystem\n(S'false'\ntR."})])
    prepare_dataset(tmp_path, **CRUDE)
    report = lint_dataset(tmp_path, engine=ALONE)
    assert report.ok
    assert report.unchecked == {"pkl": 1}


def test_lines_of_jsonl_files_are_looked_at(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"b": }\n')
    prepare_jsonl(path)
    (finding,) = lint_dataset(path, engine=ALONE).findings
    assert finding.key == "1"


@pytest.mark.slow
def test_findings_that_say_the_same_are_one_line_with_three_keys(tmp_path):
    samples = [(f"s{n:03}", {"jpg": jpeg(n % 3), "txt": b"x"}) for n in range(40)]
    for n in range(5, 30):
        samples[n] = (samples[n][0], {"jpg": samples[n][1]["jpg"]})
    for n in range(30, 35):
        samples[n][1]["jpg"] = jpeg(n)[: 200 + n]
    write_shard(tmp_path / "ds/0.tar", samples)
    root = make_captions(tmp_path / "ds", [])
    report = lint_dataset(root, engine=ALONE)
    assert len(report.findings) == 2 * 30
    lines = [group.line() for group in report.groups()]
    assert len(lines) == 2
    assert lines[0].startswith(f"{root}: 25 samples: no part 'txt' for the field 'caption': ")
    assert lines[0].endswith("(first: 0.tar/s005, 0.tar/s006, 0.tar/s007)")
    assert lines[1].startswith(f"{root}: 5 samples: jpg: ")
    assert lines[1].endswith("(first: 0.tar/s030, 0.tar/s031, 0.tar/s032)")
    done = lint(root)
    assert done.exit_code == 1
    assert done.output.count("\n") == 3
    about = json.loads(lint(root, "--json").stdout)
    assert [group["count"] for group in about["groups"]] == [25, 5]
    assert len(about["problems"]) == 60


def test_different_problems_of_several_datasets_are_lines_of_their_own(tmp_path):
    for name in ("a", "b"):
        samples = [
            (f"s{n}", {"json": b"{" if n else b'{"a": 1}', "x.json": b"?"}) for n in range(3)
        ]
        write_crude(tmp_path / name, samples)
    (tmp_path / "blend.yaml").write_text("splits: {train: {blend: [{path: a}, {path: b}]}}\n")
    groups = lint_dataset(tmp_path / "blend.yaml", engine=ALONE).groups()
    assert [(os.path.basename(each.dataset), each.count) for each in groups] == [
        ("a", 3),
        ("a", 2),
        ("b", 3),
        ("b", 2),
    ]


@pytest.mark.parametrize("what", ["samples", "shards"])
def test_a_dataset_of_which_everything_is_excluded_fails_as_the_loader_does(tmp_path, what):
    root = make_captions(tmp_path / "ds", [2, 1], split_parts=["train:.*"])
    path = root / ".nv-meta/split.yaml"
    shards = ["shards/000.tar", "shards/001.tar"]
    samples = [f"shards/000.tar/s{n}" for n in range(2)] + ["shards/001.tar/s2"]
    entries = {"shards": shards, "samples": samples}[what]
    path.write_text(path.read_text().replace("[]", json.dumps(entries)))
    with pytest.raises(EmptyDatasetError):
        WebdatasetSource(root)
    done = lint(root)
    assert done.exit_code == 2
    assert "split 'train' has no samples" in done.output
    assert "no problems" not in done.output


def test_splits_may_be_separated_by_commas(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2, 1], split_parts=["a:.*000", "b:.*001", "c:.*2"])
    for arguments in (("--split", "a,b"), ("--split", "a", "--split-parts", "b")):
        assert "5 samples: no problems" in lint(root, *arguments).output


def test_a_split_of_which_everything_is_excluded_is_a_problem_beside_others(tmp_path):
    root = make_captions(tmp_path / "ds", [2, 1], split_parts=["train:.*000", "val:.*001"])
    path = root / ".nv-meta/split.yaml"
    path.write_text(path.read_text().replace("[]", "[shards/001.tar]"))
    assert lint(root, "--split", "train").exit_code == 0
    done = lint(root)
    assert done.exit_code == 1
    assert "split 'val' has no samples" in done.output
    assert "2 samples: 1 problem" in done.output
    assert lint(root, "--split", "val").exit_code == 2


def test_a_folder_that_is_not_prepared_is_named_by_its_path_too_if_given_as_an_url(tmp_path):
    write_shard(tmp_path / "0.tar", [("s", {"txt": b"x"})])
    with pytest.raises(DatasetNotFoundError, match=f"run `energon prepare {tmp_path}`"):
        lint_dataset(tmp_path.as_uri())


def test_where_there_is_nothing_to_look_at_nothing_is_said_to_be_right(tmp_path):
    root = make_captions(tmp_path / "ds", [2], split_parts=["train:.*"])
    path = root / ".nv-meta/split.yaml"
    path.write_text("split_parts: {train: [shards/000.tar], val: []}\n")
    done = lint(root, "--split", "val")
    assert done.exit_code == 2
    assert "there is no sample to check in split 'val'" in done.output
    path.write_text("split_parts: {train: []}\n")
    assert lint(root).exit_code == 2
    (tmp_path / "files").mkdir()
    assert lint(f"filesystem://{tmp_path}/files").exit_code == 2


@pytest.mark.parametrize("most", [1, 7, 19, 99])
def test_as_many_samples_are_looked_at_as_are_asked_for(tmp_path, most):
    root = make_captions(tmp_path / "ds", [9, 7, 4], split_parts=["train:.*/00[01]", "val:.*2"])
    report = lint_dataset(root, engine=ALONE, max_samples=most)
    most = min(most, 20)
    assert sum(report.num_samples.values()) == most
    assert set(report.num_samples) == {"train", "val"}
    assert report.num_samples["val"] == pytest.approx(most / 5, abs=1)


def test_entries_of_exclude_lists_that_match_no_shard_are_found(tmp_path, caplog):
    root = make_captions(tmp_path / "ds", [2, 1])
    path = root / ".nv-meta/split.yaml"
    text = path.read_text()
    path.write_text(text.replace("exclude: []", "exclude: [shards/00l.tar, '{0,1}.tar/s1']"))
    report = lint_dataset(root, engine=ALONE)
    assert [each.reason.partition("split.yaml: ")[2] for each in report.findings] == [
        "'shards/00l.tar' is excluded, but matches no shard; did you mean 'shards/001.tar'?",
        "'{0,1}.tar/s1' is excluded, but matches no shard",
    ]
    assert "is excluded" not in caplog.text  # the report says it
    path.write_text(text.replace("exclude: []", "exclude: ['shards/{000,9}.tar/s1']"))
    assert lint_dataset(root, engine=ALONE).ok


OWN = """
from dataclasses import dataclass
from energon import Sample

@dataclass
class Remark(Sample):
    text: str

    def __post_init__(self):
        if self.text == "s3":
            raise ValueError("a remark that says nothing")
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_know_the_classes_that_the_program_has_imported(tmp_path, monkeypatch, num_workers):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/remarks_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "code")
    write_crude(tmp_path, [(f"s{n}", {"txt": f"s{n}".encode()}) for n in range(6)])
    (tmp_path / ".nv-meta/dataset.yaml").write_text(
        "sample_type: {__module__: remarks_of_a_test, __class__: Remark}\n"
        "__module__: megatron.energon\n__class__: StandardWebdatasetFactory\n"
        "field_map: {text: txt}\n"
    )
    engine = Engine(num_workers=num_workers)
    assert "importing its module would run code" in str(lint_dataset(tmp_path, engine=engine))
    importlib.import_module("remarks_of_a_test")
    (found,) = lint_dataset(tmp_path, engine=engine).findings
    assert (found.key, "says nothing" in found.reason) == ("s3", True)
    del sys.modules["remarks_of_a_test"]


def test_a_split_is_found_by_a_name_that_means_the_same(tmp_path):
    parts = ["train:.*000", "validation:.*001"]
    root = make_captions(tmp_path / "ds", [2, 3], split_parts=parts)
    done = lint(root, "--split", "val")
    assert (done.exit_code, done.output) == (0, "3 samples: no problems\n")


@pytest.mark.parametrize(
    ("command", "check"),
    [
        ("lint", "energon.inspect.lint.lint_dataset"),
        ("verify", "energon.prepare.verify.dataset.verify_dataset"),
        ("repair", "energon.prepare.verify.dataset.repair_dataset"),
    ],
)
def test_the_quarantine_file_is_checked_before_the_samples(tmp_path, monkeypatch, command, check):
    root = make_damaged(tmp_path / "ds")
    (tmp_path / "blend.yaml").write_text("splits: {train: {path: ds}}\n")
    (tmp_path / "list").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(check, None)
    cases = [
        (root, tmp_path / "folder", "is a folder, expected a file"),
        (root, tmp_path / "list" / "below", "cannot write to"),
        (root, "/proc/list.jsonl", "cannot write to /proc"),  # though root may write everywhere
        (tmp_path / "blend.yaml", tmp_path / "list", "a metadataset needs a folder"),
        (tmp_path / "blend.yaml", "/proc/lists", "cannot write to /proc"),
    ]
    for path, quarantine_path, message in cases[: 3 if command == "repair" else 5]:
        result = run(command, path, "--quarantine", quarantine_path)
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())
