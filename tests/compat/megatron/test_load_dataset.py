from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from energon.cli.main import main
from energon.metadataset.leaf import BlendMode
from megatron.energon import (
    ConfigError,
    DatasetLoader,
    load_dataset,
    prepare_metadataset,
)
from tests.datasets import make_crude
from tests.sources.reads import read_samples

JOINED = """
vars: {right: b}
splits:
  train:
    blend:
      - join: [{path: a}, {path: "${right}", nonmatch: skip}]
        joiner: {__module__: nobody.has.it, __function__: f}
        weight: 3
      - {path: a, subflavors: {x: 1}, subset: {range: ["0%", "50%"]}}
  val:
    join: [{path: a}, {path: b, nonmatch: none}]
    joiner: {__module__: nobody.has.it, __function__: f}
  test:
"""


@pytest.fixture
def root(tmp_path):
    make_crude(tmp_path / "a", [3, 4])
    make_crude(tmp_path / "b", [2, 3])
    (tmp_path / "m.yaml").write_text(JOINED)
    return tmp_path


def plain(root, key="blend", **besides):
    entries = [{"path": str(root / "a"), **besides}, {"path": str(root / "b")}]
    return {"splits": {"train": {key: entries}}}


def test_opens_the_leaves_of_a_document_in_memory(root):
    found = load_dataset(plain(root, weight=3)).get_datasets(
        training=True, split_part="train", subflavors={"y": 2}, subset=("0%", "50%")
    )
    assert found.blend_mode is BlendMode.DATASET_WEIGHT
    first, second = found.datasets
    assert (first.weight, second.weight, first.repetitions) == (0.75, 0.25, None)
    assert (len(first.dataset.source), len(second.dataset.source)) == (3, 2)
    assert first.dataset.subflavors == {"y": 2}
    (sample,) = read_samples(first.dataset.source, np.array([2]))
    assert sample["txt"] == b"text 2"


def test_a_loader_may_say_which_split_and_what_is_merged(root):
    document = {"splits": {"val": {"path": str(root / "a")}}}
    loader = DatasetLoader(
        document, split_part="val", subflavors={"x": 2, "y": 2}, shuffle_over_epochs_multiplier=3
    )
    (found,) = loader.get_datasets(
        training=False,
        split_part="train",
        subflavors={"y": 3},
        shuffle_over_epochs_multiplier=2,
    ).datasets
    assert found.dataset.subflavors == {"x": 2, "y": 3}
    assert found.dataset.plan_leaf.shuffle_over_epochs == 6


def test_repetitions_and_multipliers_are_those_of_the_document(root):
    document = plain(root, "blend_epochized", repetitions=2, shuffle_over_epochs_multiplier=3)
    found = load_dataset(document).get_datasets(
        training=True, split_part="train", shuffle_over_epochs_multiplier=2
    )
    assert found.blend_mode is BlendMode.SAMPLE_REPETITIONS
    assert [each.repetitions for each in found.datasets] == [2, 1]
    assert [each.weight for each in found.datasets] == [None, None]
    assert [each.dataset.plan_leaf.shuffle_over_epochs for each in found.datasets] == [6, 2]
    val = load_dataset(document).get_datasets(training=False, split_part="train")
    assert val.blend_mode is BlendMode.SAMPLE_REPETITIONS


def test_lists_what_a_split_consists_of(root):
    loader = load_dataset(root / "m.yaml")
    assert loader.splits == ["train", "val"]
    names = [
        (Path(each.path).name, each.subflavors) for each in loader.traverse(split_part="train")
    ]
    assert names == [("a", {}), ("b", {}), ("a", {"x": 1})]
    assert load_dataset({"splits": {"x": {"path": "a"}}}).splits == ["x"]
    with pytest.raises(ConfigError, match="is not a metadataset"):
        assert load_dataset(root / "a").splits


def test_preparing_builds_the_indexes_of_all_splits_and_deletes_older_ones(root):
    path = root / "m.yaml"
    found = prepare_metadataset(path)
    folder = root / "m.yaml.cache"
    assert {each.parent for each in found} == {folder}
    assert sorted(folder.iterdir()) == sorted(found)
    assert len(found) == 2
    times = [each.stat().st_mtime_ns for each in found]
    assert [each.stat().st_mtime_ns for each in prepare_metadataset(path)] == times
    path.write_text(JOINED.replace("nonmatch: none", "nonmatch: skip"))
    # Both splits are the same join now.
    assert set(prepare_metadataset(path)) == {found[0]}
    assert [*folder.iterdir()] == [found[0]]


def test_the_command_line_prepares_metadatasets(root):
    result = CliRunner().invoke(main, ["prepare", str(root / "m.yaml")])
    assert result.exit_code == 0, result.output
    assert "2 join indexes are up to date" in result.output
    (root / "plain.yaml").write_text(
        "{__module__: megatron.energon, __class__: MetadatasetV2, splits: {train: {path: a}}}"
    )
    result = CliRunner().invoke(main, ["prepare", str(root / "plain.yaml")])
    assert "plain.yaml has no joins, so there is nothing to prepare" in result.output
    (root / "m.yaml").write_text(JOINED.replace(", nonmatch: skip", ""))
    result = CliRunner().invoke(main, ["prepare", str(root / "m.yaml")])
    assert result.exit_code == 2
    assert "lacks 2 of the 7 keys" in result.output


def test_a_split_that_is_empty_is_left_out(root):
    (root / "m.yaml").write_text("splits: {train: {path: a}, test: }")
    assert prepare_metadataset(root / "m.yaml") == []
