from __future__ import annotations

from energon.inspect.info import describe
from energon.prepare.dataset import prepare_dataset
from tests.datasets import make_captions, make_crude, write_shard


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
    write_shard(root / "0.tar", [("a", {"txt": b"12345678"}), ("b", {"txt": b"", "bin": b"123"})])
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
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


def test_describes_the_datasets_of_a_metadataset(tmp_path):
    make_captions(tmp_path / "a", [2])
    make_crude(tmp_path / "b", [3])
    blend = tmp_path / "blend.yaml"
    blend.write_text("splits:\n  train:\n    blend:\n      - path: a\n      - path: b\n")
    about = describe(blend)
    assert about["splits"]["train"]["samples"] == 5
    assert [leaf["samples"] for leaf in about["splits"]["train"]["leaves"]] == [2, 3]
    assert about["datasets"][str(tmp_path / "b")]["sample_type"] == "CrudeWebdataset"
