"""Documents as people write them, each in a file of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from energon.errors import ConfigError
from energon.formats.meta import yaml
from energon.formats.meta.info import load_split
from energon.metadataset import document
from energon.metadataset.dataset_config import load_dataset_config
from energon.metadataset.document import read_metadataset
from tests.metadataset.folders import write

EXAMPLES = Path(__file__).with_name("examples")
SCHEMA = json.loads(Path(document.__file__).with_name("schema.json").read_text())


def named(folder):
    return sorted(path.name for path in (EXAMPLES / folder).iterdir())


def as_json(path):
    """What an editor checks: keys of JSON are text, and anchors are replaced."""
    return json.loads(json.dumps(yaml.plain(yaml.load(path.read_bytes(), origin=str(path)))))


@pytest.mark.parametrize("name", named("metadataset"))
def test_a_metadataset_is_read_and_keeps_to_the_schema(name):
    path = EXAMPLES / "metadataset" / name
    assert "train" in read_metadataset(str(path), allow=("env",)).content.splits
    jsonschema.Draft202012Validator(SCHEMA).validate(as_json(path))


@pytest.mark.parametrize(
    "node",
    [
        "{path: a, wieght: 3}",
        "{blend: [{path: a, weight: -1}]}",
        "{blend: [{path: a, weight: {5: 1}}]}",
        "{blend: [{path: a, weight: {0: 1, 9: go to 2}}]}",
        "{blend: [{path: a, max_epochs: 0}]}",
        "{blend: [{path: a}], unit: batches}",
        "{concat: [{path: a, weight: 1}]}",
        "{path: a, shuffle_over_epochs_multiplier: x}",
        "{path: a, blend: []}",
        "{}",
    ],
)
def test_grammar_and_schema_refuse_the_same(tmp_path, node):
    path = Path(write(tmp_path / "m.yaml", f"splits: {{train: {node}}}"))
    with pytest.raises(ConfigError):
        read_metadataset(str(path))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(as_json(path))


@pytest.mark.parametrize("name", named("dataset"))
def test_a_description_of_samples_is_read(tmp_path, name):
    (tmp_path / ".nv-meta").mkdir()
    shutil.copy(EXAMPLES / "dataset" / name, tmp_path / ".nv-meta" / "dataset.yaml")
    config = load_dataset_config(tmp_path)
    assert config.crude == name.startswith("crude")
    assert config.subflavors == (
        {"example_crude_selector": "foobar"} if "subflavors" in name else {}
    )


def test_splits_are_read(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    for name in named("split"):
        shutil.copy(EXAMPLES / "split" / name, tmp_path / ".nv-meta")
    plain = load_split(tmp_path, "plain.yaml")
    assert plain.shards("train") == ["shards/shard_000.tar", "shards/shard_001.tar"]
    excluding = load_split(tmp_path, "excluding.yaml")
    assert excluding.shards("train") == [f"shards/shard_00{n}.tar" for n in range(4)]
    assert excluding.excluded_samples == [
        ("shards/shard_001.tar", "000032"),
        ("shards/shard_001.tar", "000033"),
    ]
    twice = load_split(tmp_path, "excluding_twice.yaml")
    assert {*twice.excluded_samples} == {("shards/shard_001.tar", "000032")}
