"""Datasets that a program joins."""

from __future__ import annotations

import pytest

from energon.compat.megatron.datasets.others import JoinedWebdatasetFactory
from energon.compat.megatron.datasets.webdataset import CrudeWebdataset, StandardWebdatasetFactory
from energon.testing import check_resume
from megatron.energon import (
    BatchDataset,
    ConfigError,
    EmptyDatasetError,
    RepeatDataset,
    Sample,
    TextSample,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
)
from megatron.energon.epathlib import EPath
from tests.datasets import make_crude
from tests.task_encoder.runs import config


@edataclass
class Pair(Sample):
    left: str
    right: str | None

    @classmethod
    def from_joined(cls, left, right):
        other = None if right is None else right["txt"]
        return cls.derive_from(left, left=left.text, right=other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    make_crude(folder / "left", [4, 5])
    make_crude(folder / "right", [3, 3])
    return folder


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def left(folder):
    return StandardWebdatasetFactory(
        folder / "left",
        sample_type=TextSample,
        field_map={"text": "txt"},
        split_part="val",
        worker_config=config(),
        subflavors={"side": "left"},
    )


def right(folder):
    return CrudeWebdataset(folder / "right", split_part="val", worker_config=config())


def samples(dataset):
    batches = BatchDataset(dataset.build(), 2, list, worker_config=config())
    with get_savable_loader(batches) as loader:
        return [sample for batch in loader for sample in batch]


def joined(folder, **settings):
    arguments = {"joiner": Pair, "nonmatch": "none", "training": False, **settings}
    return JoinedWebdatasetFactory(
        [left(folder), right(folder)], worker_config=config(), **arguments
    )


def test_samples_of_the_same_key_are_joined(folder):
    dataset = joined(folder)
    assert dataset.paths == [EPath(folder / "left"), EPath(folder / "right")]
    assert dataset.subflavors == {"side": "left"}
    assert len(dataset) == 9
    found = samples(dataset)
    expected = [(f"s{n}", f"text {n}", f"text {n}" if n < 6 else None) for n in range(9)]
    assert [(pair.__key__, pair.left, pair.right) for pair in found] == expected
    assert len(joined(folder, nonmatch="skip")) == 6
    assert len(joined(folder, subset=(2, 5))) == 3


def test_a_function_may_join_and_get_samples_by_name(folder):
    def join(*, text, other):
        assert text.__key__ == other["__key__"]
        return TextSample(**basic_sample_keys(other), text=f"{text.text}|{other['txt']}")

    dataset = JoinedWebdatasetFactory(
        {"other": right(folder), "text": left(folder)},
        joiner=join,
        training=False,
        worker_config=config(),
    )
    assert [each.text for each in samples(dataset)] == [f"text {n}|text {n}" for n in range(6)]


def test_joined_samples_resume_and_are_made_again(folder):
    dataset = RepeatDataset(joined(folder, training=True).build(), worker_config=config())
    found = check_resume(dataset, limit=20)
    assert {pair.left for pair in found} <= {f"text {n}" for n in range(9)}
    assert dataset.restore_sample(found[3].__restore_key__) == found[3]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"nonmatch": "error"}, ConfigError, "s6"),
        ({"joiner": TextSample.text}, ConfigError, "expected a function"),
        ({"joiner": int}, ConfigError, "from_joined"),
        ({"subset": (20, 30)}, (ConfigError, EmptyDatasetError), "9"),
    ],
)
def test_joins_that_make_no_sense_are_refused(folder, settings, kind, message):
    with pytest.raises(kind, match=message):
        joined(folder, **settings)


def test_other_things_than_datasets_of_shards_are_refused(folder):
    with pytest.raises(ConfigError, match="two datasets or more, got 1"):
        JoinedWebdatasetFactory([left(folder)], joiner=Pair, worker_config=config())
    with pytest.raises(ConfigError, match="cannot join str"):
        JoinedWebdatasetFactory([left(folder), "x"], joiner=Pair, worker_config=config())
