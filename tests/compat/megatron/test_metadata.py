from __future__ import annotations

import pytest

from energon import CaptioningSample, ConfigError, SecurityError
from energon.compat.megatron.datasets.webdataset import CrudeWebdataset, StandardWebdatasetFactory
from megatron.energon.dataset_config import load_config
from tests.datasets import make_captions
from tests.task_encoder.runs import config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_captions(tmp_path_factory.mktemp("captions") / "ds", [4, 3, 2])


def test_a_description_becomes_the_dataset_that_it_describes(root):
    dataset = load_config(
        root / ".nv-meta" / "dataset.yaml",
        default_type=StandardWebdatasetFactory,
        default_kwargs={"path": root, "split_part": "val", "worker_config": config()},
    )
    assert isinstance(dataset, StandardWebdatasetFactory)
    assert dataset.__sample_type__ is CaptioningSample
    assert len(dataset) == 9


def test_a_description_may_name_its_class(root):
    document = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset", "path": root}
    settings = {"split_part": "val", "worker_config": config()}
    dataset = load_config(document, default_type=dict, default_kwargs=settings)
    assert isinstance(dataset, CrudeWebdataset)


@pytest.mark.parametrize(
    ("document", "kind", "message"),
    [
        ({"pth": 1}, ConfigError, "has no 'pth'"),
        ({}, ConfigError, "missing 1 required"),
        ({"__module__": "antigravity", "__class__": "X"}, SecurityError, "antigravity"),
        ({"__module__": "energon", "__class__": "Crude"}, ConfigError, "Crude"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(document, kind, message):
    with pytest.raises(kind, match=message):
        load_config(document, default_type=lambda path: path)


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping, found"):
        load_config(tmp_path / "x.yaml", default_type=dict)
