from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner

from energon.cli.main import main
from energon.errors import ConfigError
from energon.inspect.info import describe
from energon.io.files import write_bytes
from energon.prepare.dataset import prepare_dataset
from energon.prepare.jsonl import prepare_jsonl
from tests.datasets import make_captions, make_crude, write_crude, write_shard
from tests.sources.distant import upload


def test_counts_what_a_split_really_has(tmp_path):
    root = make_crude(tmp_path / "ds", [4, 4])
    split = "split_parts:\n  train: [000.tar, 001.tar]\n  val: [001.tar]\nexclude: [000.tar/s1]\n"
    split += "sample_ranges:\n  train: {001.tar: [0, 1]}\n  val: {001.tar: [1, 4]}\n"
    (root / ".nv-meta/split.yaml").write_text(split)
    about = describe(root)
    assert about["splits"] == {
        "train": {"samples": 4, "shards": 2, "excluded": 1},
        "val": {"samples": 3, "shards": 1, "excluded": 0},
    }


def test_counts_parts_and_their_sizes(tmp_path):
    root = tmp_path / "ds"
    write_crude(root, [("a", {"txt": b"12345678"}), ("b", {"txt": b"", "bin": b"123"})])
    about = describe(root)
    assert about["parts"]["txt"] == {
        "count": 2,
        "bytes": 8,
        "mean": 4.0,
        "min": 0,
        "max": 8,
        "histogram": [
            {"below": 1, "count": 1},
            {"below": 2, "count": 0},
            {"below": 4, "count": 0},
            {"below": 8, "count": 0},
            {"below": 16, "count": 1},
        ],
    }
    assert about["parts"]["bin"]["count"] == 1
    assert about["sample_sizes"]["count"] == 2


def run(*words):
    result = CliRunner().invoke(main, ["info", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def test_shares_repetitions_subflavors_and_auxiliary_data_are_told(tmp_path):
    make_captions(tmp_path / "a", [2])
    make_crude(tmp_path / "b", [3])
    (tmp_path / "blend.yaml").write_text(
        "splits:\n  train:\n    blend:\n"
        "      - {path: a, weight: 3, subflavors: {kind: x}}\n"
        "      - {path: b, weight: 1, aux: {pictures: a}}\n"
        "  val:\n    blend_epochized:\n      - {path: a, repetitions: 2.5}\n"
    )
    about = describe(tmp_path / "blend.yaml")
    first, second = about["splits"]["train"]["leaves"]
    assert (first["weight"], second["weight"]) == (0.75, 0.25)
    assert first["subflavors"] == {"kind": "x"}
    assert second["aux"] == {"pictures": str(tmp_path / "a")}
    assert about["splits"]["val"]["samples_per_epoch"] == 5
    shown = run(tmp_path / "blend.yaml")
    assert f"  - 75.0 % {tmp_path}/a (train): 2 samples; subflavors kind: x\n" in shown
    assert f"  - 25.0 % {tmp_path}/b (train): 3 samples; aux pictures: {tmp_path}/a\n" in shown
    assert f"- split val: 2 samples, 5 with repetitions\n  - 2.5 times {tmp_path}/a" in shown
    assert f"\n## {tmp_path}/a\n- sample type: CaptioningSample\n" in shown


def test_joins_are_counted_once_their_index_is_there(tmp_path):
    make_captions(tmp_path / "a", [4])
    make_crude(tmp_path / "b", [2])
    (tmp_path / "join.yaml").write_text(
        "splits:\n  train:\n    join:\n"
        "      - {path: a}\n      - {path: b, nonmatch: skip}\n"
        "    joiner: {__module__: megatron.energon, __class__: TextSample}\n"
    )
    (leaf,) = describe(tmp_path / "join.yaml")["splits"]["train"]["leaves"]
    assert leaf["samples"] is None
    assert [member["nonmatch"] for member in leaf["join"]] == ["error", "skip"]
    assert "not counted before" in run(tmp_path / "join.yaml")
    assert not (tmp_path / "join.yaml.cache").exists()
    CliRunner().invoke(main, ["prepare", str(tmp_path / "join.yaml")], catch_exceptions=False)
    split = describe(tmp_path / "join.yaml")["splits"]["train"]
    assert split["samples"] == split["leaves"][0]["samples"] == 2


def test_what_is_wrong_with_a_split_is_told_and_the_others_are_described(tmp_path):
    make_captions(tmp_path / "a", [2])
    (tmp_path / "blend.yaml").write_text("splits:\n  train: {path: a}\n  val: {path: gone}\n")
    about = describe(tmp_path / "blend.yaml")
    assert list(about["splits"]) == ["train"]
    (problem,) = about["problems"]
    assert "gone does not exist" in problem
    done = CliRunner().invoke(main, ["info", str(tmp_path / "blend.yaml")])
    assert done.exit_code == 2
    assert f"- problem: {problem}" in done.stdout


def test_a_dataset_whose_code_is_not_allowed_is_described(tmp_path, monkeypatch):
    monkeypatch.delenv("ENERGON_ALLOW", raising=False)
    write_shard(tmp_path / "ds/0.tar", [("a", {"txt": b""})])
    prepare_dataset(
        tmp_path / "ds",
        split_parts=["train:.*"],
        sample_type="TextSample",
        sample_loader="raise SystemExit\n",
    )
    (tmp_path / "meta.yaml").write_text("splits:\n  train: {path: ds}\n")
    assert describe(tmp_path / "meta.yaml")["splits"]["train"]["samples"] == 1
    assert describe(tmp_path / "ds")["sample_type"] == "TextSample"


def test_a_missing_description_that_was_named_is_an_error(tmp_path):
    dataset = make_crude(tmp_path / "ds", [2])
    with pytest.raises(ConfigError, match=r"nope.yaml is missing"):
        describe(dataset, dataset_config="nope.yaml")


def test_lines_of_a_jsonl_file_are_counted_and_measured(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(8, 12)))
    prepare_jsonl(path)
    about = describe(path)
    assert about["samples"] == 4
    assert (about["parts"]["json"]["min"], about["parts"]["json"]["max"]) == (9, 10)
    assert about["splits"]["train"]["samples"] == 4
    assert "- part json: 4 with 38 bytes" in run(path)


def test_the_histogram_has_a_line_for_each_size(tmp_path):
    samples = [(f"s{n}", {"bin": bytes(1 << n)}) for n in (1, 1, 3)]
    write_crude(tmp_path, [(f"k{n}", parts) for n, (_, parts) in enumerate(samples)])
    lines = run(tmp_path).splitlines()
    at = lines.index("- bytes of a sample: 4 on average, from 2 to 8")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["below", "4", "B", "2", "#" * 32],
        ["below", "8", "B", "0"],
        ["below", "16", "B", "1", "#" * 16],
    ]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_missing_shards_are_named_and_the_rest_is_counted(tmp_path, words):
    root = make_crude(tmp_path / "ds", [2, 3])
    (root / "001.tar").unlink()
    shown = run(root, *words)
    if words:
        about = json.loads(shown)
        assert about["missing_shards"] == ["001.tar"]
        assert about["parts"]["txt"]["count"] == 2
    else:
        assert "- missing shards: 001.tar" in shown


def test_files_of_a_folder_are_counted_by_extension(tmp_path):
    (tmp_path / "files/a").mkdir(parents=True)
    for name, size in (("a/x.jpg", 5), ("y.JPG", 9), ("README", 0)):
        (tmp_path / "files" / name).write_bytes(bytes(size))
    address = f"filesystem://{tmp_path}/files"
    about = describe(address)
    assert (about["kind"], about["files"], about["bytes"]) == ("filesystem", 3, 14)
    assert {name: part["count"] for name, part in about["extensions"].items()} == {
        "jpg": 2,
        "none": 1,
    }
    shown = run(address)
    assert "- extension jpg: 2 with 14 bytes, 7 on average, from 5 to 9\n" in shown
    assert "- bytes of a file: 5 on average, from 0 to 9\n" in shown
    assert "files" not in describe(address, parts=False)


def test_files_of_a_distant_folder_are_counted(s3):
    write_bytes(f"{s3.address}/files/a.txt", b"12345")
    about = describe(f"filesystem+{s3.address}/files")
    assert (about["files"], about["bytes"]) == (1, 5)


def test_a_distant_metadataset_is_described(s3, tmp_path):
    make_crude(tmp_path / "ds", [3])
    upload(tmp_path / "ds", s3.address)
    write_bytes(f"{s3.address}/meta.yaml", b"splits: {train: {path: ds}}")
    about = describe(f"{s3.address}/meta.yaml")
    assert about["splits"]["train"]["samples"] == 3
    assert about["datasets"][f"{s3.address}/ds"]["parts"]["txt"]["count"] == 3


def test_a_dataset_that_another_tool_has_prepared_is_described_without_reading_shards(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2], split_parts=["train:.*"])
    (root / "shards/001.tar").rename(tmp_path / "aside")
    expected = describe(root)
    for table in root.rglob("*.parts"):
        table.unlink()
    (root / "shards/000.tar").write_bytes(bytes(expected["bytes"]))
    assert describe(root) == expected
    assert expected["parts"]["txt"]["count"] == expected["sample_sizes"]["count"] == 3


def test_a_dataset_of_an_early_tool_is_described_by_the_headers_in_its_shards(tmp_path):
    root = make_captions(tmp_path / "ds", [3, 2], split_parts=["train:.*"])
    expected = describe(root)
    for table in root.rglob("*.parts"):
        table.unlink()
    with closing(sqlite3.connect(root / ".nv-meta/index.sqlite")) as connection:
        connection.execute("DROP TABLE sample_parts")
    assert describe(root) == expected


def test_a_shard_that_is_cut_off_is_named_and_the_others_are_described(tmp_path):
    root = make_crude(tmp_path / "ds", [2, 3])
    os.truncate(root / "001.tar", 1000)
    about = describe(root)
    assert about["parts"]["txt"]["count"] == 2
    (reason,) = about["unreadable_shards"]
    assert "001.tar: has 1000 bytes" in reason
    assert f"- cannot be read: {reason}" in run(root)


@pytest.mark.parametrize("command", ["info", "lint"])
def test_a_dataset_without_its_list_of_shards_is_no_folder_of_files(tmp_path, command):
    root = make_crude(tmp_path / "ds", [4])
    (root / ".nv-meta/.info.json").unlink()
    result = CliRunner().invoke(main, [command, str(root)])
    assert result.exit_code != 0
    assert ".info.json is missing; restore the file, or run `energon prepare" in result.output
