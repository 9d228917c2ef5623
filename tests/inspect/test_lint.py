from __future__ import annotations

from energon.inspect.lint import lint_dataset, quarantine
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine
from energon.sources.webdataset import WebdatasetSource
from tests.datasets import jpeg, make_captions, write_shard

ALONE = Engine(num_workers=1)


def make_damaged(root):
    """Two shards of two samples each, of which c has half an image."""
    write_shard(root / "0.tar", [("a", {"jpg": jpeg(0)}), ("b", {"jpg": jpeg(1)})])
    write_shard(root / "1.tar", [("c", {"jpg": jpeg(2)[:200]}), ("d", {"jpg": jpeg(3)})])
    prepare_dataset(root, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return root


def test_finds_nothing_wrong_with_whole_samples(tmp_path):
    root = make_captions(tmp_path / "ds", [2, 3])
    report = lint_dataset(root, engine=ALONE)
    assert report.ok
    assert report.num_samples == {"train": 5, "val": 5}


def test_names_the_part_of_a_crude_sample_that_cannot_be_decoded(tmp_path):
    root = make_damaged(tmp_path / "ds")
    report = lint_dataset(root, engine=ALONE)
    assert [(each.shard, each.key, each.part) for each in report.findings] == [
        ("1.tar", "c", "jpg")
    ]


def test_prepare_leaves_out_what_lint_has_put_into_quarantine(tmp_path):
    root = make_damaged(tmp_path / "ds")
    quarantine(lint_dataset(root, engine=ALONE), tmp_path / "bad.jsonl")
    prepare_dataset(
        root,
        split_parts=["train:.*"],
        sample_type="CrudeWebdataset",
        exclude_from=[tmp_path / "bad.jsonl"],
    )
    assert len(WebdatasetSource(root)) == 3
    assert lint_dataset(root, engine=ALONE).ok
