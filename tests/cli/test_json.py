"""What commands print with `--json`: the whole result, on standard output, and nothing else."""

from __future__ import annotations

import json

import click
import pytest

from tests.cli.test_consistency import COMMANDS
from tests.commands import ok
from tests.datasets import jpeg, make_captions, make_crude, write_crude, write_shard
from tests.sources.distant import upload

SHOWN_ONLY = {"mount", "view"}
"""They serve until they are stopped, and have no result."""


def printed(*arguments):
    done = ok(*arguments, "--json")
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", [p for p in COMMANDS if p[0] != "tar"], ids=" ".join)
def test_every_command_with_a_result_prints_it_as_json(path):
    names = {
        name
        for each in COMMANDS[path].params
        if isinstance(each, click.Option)
        for name in each.opts
    }
    assert ("--json" in names) != (" ".join(path) in SHOWN_ONLY)


def test_prepare_and_index(tmp_path):
    root = tmp_path / "ds"
    write_shard(root / "0.tar", [(str(n), {"jpg": jpeg(n)}) for n in range(3)])
    size = {"path": str(root), "samples": 3, "shards": 1}
    about = printed("prepare", root, "--split-ratio", "1", "--media-metadata-by-extension")
    assert about == {**size, "media": {"files": 3, "looked_at": 1, "failed": []}}
    assert printed("index", root) == size
    assert printed("prepare", root, "--tar-index-only") == size


def test_prepare_and_index_in_a_bucket(tmp_path, s3):
    write_shard(tmp_path / "ds/0.tar", [(str(n), {"jpg": jpeg(n)}) for n in range(3)])
    address = upload(tmp_path / "ds", s3.address)
    size = {"path": address, "samples": 3, "shards": 1}
    about = printed("prepare", address, "--split-ratio", "1", "--media-metadata-by-extension")
    assert about == {**size, "media": {"files": 3, "looked_at": 1, "failed": []}}
    assert printed("index", address) == size


def test_prepare_of_a_jsonl_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert printed("prepare", path) == {"path": str(path), "samples": 2}
    assert printed("index", path) == {"path": str(path), "samples": 2}


def test_prepare_of_a_metadataset(tmp_path):
    make_crude(tmp_path / "a", [2])
    make_crude(tmp_path / "b", [2])
    path = tmp_path / "mix.yaml"
    path.write_text(
        "splits: {train: {join: [{path: a}, {path: b}], "
        "joiner: {__module__: energon, __class__: TextSample}}}"
    )
    about = printed("prepare", path)
    assert about["path"] == str(path)
    (index,) = about["join_indexes"]
    assert index.startswith(f"{path}.cache/")


def test_pack(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / f"in/{n}.jpg").write_bytes(jpeg(n))
    assert printed("pack", tmp_path / "in", tmp_path / "out") == {
        "path": str(tmp_path / "out"),
        "samples": 3,
        "shards": 1,
        "kind": "folder",
        "left_out": [],
    }


def test_prepare_media_names_what_is_damaged(tmp_path):
    for n in range(2):
        (tmp_path / f"{n}.jpg").write_bytes(jpeg(n))
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    about = printed("prepare-media", tmp_path, "--media-metadata-by-extension")
    assert (about["path"], about["files"], about["looked_at"]) == (str(tmp_path), 2, 3)
    (failed,) = about["failed"]
    assert failed["file"] == "bad.jpg"
    assert failed["reason"]


def test_preview(tmp_path):
    make_captions(tmp_path, [1])
    (sample,) = printed("preview", tmp_path, "--count", "1")
    assert (sample["type"], isinstance(sample["key"], str)) == ("CaptioningSample", True)
    assert sample["fields"]["image"]["dtype"] == "uint8"
    assert len(sample["fields"]["image"]["shape"]) == 3
    assert isinstance(sample["fields"]["caption"], str)


def test_preview_of_what_json_has_no_words_for(tmp_path):
    parts = {"json": b'{"a": [1, NaN, null]}', "bin": b"\0\1"}
    write_crude(tmp_path, [("x", parts)])
    (sample,) = printed("preview", tmp_path)
    assert sample["fields"] == {
        "json": {"a": [1, "nan", None]},
        "bin": {"type": "bytes", "bytes": 2},
    }


def test_analyze_debug(tmp_path):
    batches = [["a", "b"], ["a", "c"], ["a", "b"]]
    lines = [
        json.dumps({"t": "yield_batch", "m": "train", "r": rank % 2, "keys": keys})
        for rank, keys in enumerate(batches)
    ]
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    assert printed("analyze-debug", tmp_path / "0.jsonl", "--most", "1") == {
        "batches": 3,
        "samples": 6,
        "different": 3,
        "ranks": {"0": 2, "1": 1},
        "seen": {"1": 1, "2": 1, "3": 1},
        "most": [{"key": "a", "times": 3}],
    }
