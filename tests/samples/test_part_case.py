"""Parts are found whatever the case of their names is, everywhere, and keep their names."""

from __future__ import annotations

import json
import tarfile

import numpy as np
import pytest

from energon import (
    Cooker,
    DefaultTaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon.errors import ConfigError
from energon.prepare.writers.shard_writer import encode_sample
from energon.samples.crude import CrudeSample, find_part
from energon.samples.field_map import FieldMap
from energon.sources.files.locate import open_locator
from energon.sources.files.samples import WebdatasetFileStore
from energon.sources.shards import ShardPool
from energon.sources.source import SampleSelection
from energon.sources.webdataset import WebdatasetSource
from tests.commands import run
from tests.datasets import jpeg, make_captions, write_shard
from tests.sources.reads import read_samples

INLINE = WorkerConfig(rank=0, world_size=1, num_workers=0)
COUNT = 21


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Of three shards, one has small letters, one capitals, and one both."""
    root = tmp_path_factory.mktemp("case") / "dataset"
    for shard in range(3):
        samples = []
        for n in range(7 * shard, 7 * shard + 7):
            image, text = ("JPG", "Txt") if n % 2 * shard or shard == 2 else ("jpg", "txt")
            parts = {image: jpeg(n), text: f"caption {n}".encode(), "json": b'{"n": 1}'}
            samples.append((f"{n:03}", parts))
        write_shard(root / f"{shard}.tar", samples)
    make_captions(root, [])
    return root


def test_field_maps_find_parts_of_any_case(dataset):
    for read in (get_train_dataset, get_val_dataset):
        pipeline = read(dataset, worker_config=INLINE, batch_size=None)
        found = [sample for sample, _ in zip(pipeline, range(COUNT), strict=False)]
        assert sorted(each.caption for each in found) == sorted(
            f"caption {n}" for n in range(COUNT)
        )
        assert all(each.image.shape == (3, 8, 12) for each in found)


def test_cookers_find_parts_of_any_case(dataset, tmp_path):
    (dataset / ".nv-meta/crude.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )

    @stateless
    def cook(sample: CrudeSample) -> dict:
        assert "txt" in sample
        assert "png" not in sample
        text = sample.get("TXT")
        return {**basic_sample_keys(sample), "text": text, "size": sample.pop("jpg").shape}

    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

    pipeline = get_val_dataset(
        dataset,
        worker_config=INLINE,
        batch_size=None,
        dataset_config="crude.yaml",
        task_encoder=Encoder(),
    )
    assert [each["text"] for each in pipeline] == [f"caption {n}" for n in range(COUNT)]


def test_chosen_parts_are_read_in_any_case_and_keep_their_names(dataset):
    source = WebdatasetSource(dataset, SampleSelection("val", parts=["JPG"]))
    found = read_samples(source, np.arange(COUNT))
    parts = [[name for name in each if not name.startswith("__")] for each in found]
    assert all(len(names) == 1 and names[0].lower() == "jpg" for names in parts)
    assert {name for (name,) in parts} == {"jpg", "JPG"}
    assert [each["jpg"] for each in found] == [jpeg(n) for n in range(COUNT)]


@pytest.mark.parametrize("index", ["tables", "sqlite", "early sqlite"])
def test_files_are_found_by_names_of_any_case(dataset, tmp_path, index):
    import shutil
    import sqlite3

    root = tmp_path / "dataset"
    shutil.copytree(dataset, root)
    if index != "tables":
        for path in root.glob("*.parts"):
            path.unlink()
    if index == "early sqlite":
        with sqlite3.connect(root / ".nv-meta/index.sqlite") as connection:
            connection.execute("DROP TABLE sample_parts")
        connection.close()
    store = WebdatasetFileStore(root)
    for n in range(COUNT):
        assert store.get_raw(f"{n:03}.jpg")[0] == jpeg(n)
        assert f"{n:03}.TXT" in store
        assert f"{n:03}.png" not in store
    names = list(open_locator(root, ShardPool()).names())
    assert "014.JPG" in names
    assert "000.jpg" in names


def test_info_counts_parts_whatever_their_case_is(dataset):
    done = run("info", dataset, "--json")
    parts = json.loads(done.stdout)["parts"]
    assert {name: each["count"] for name, each in parts.items()} == {
        "jpg": COUNT,
        "txt": COUNT,
        "json": COUNT,
    }


def test_lint_finds_nothing_wrong_with_capitals(dataset):
    done = run("lint", dataset, "--split", "val", "--num-workers", 1)
    assert done.exit_code == 0, done.output


def test_folders_are_packed_with_the_names_that_files_have(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(6):
        (folder / f"{n}.{'JPG' if n % 2 else 'jpg'}").write_bytes(jpeg(n))
        (folder / f"{n}.txt").write_text(f"photo {n}")
    field_map = '{"image": "jpg", "caption": "TXT"}'
    options = ("--sample-type", "CaptioningSample", "--field-map", field_map)
    done = run("pack", folder, tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    with tarfile.open(tmp_path / "out/shards/00000.tar") as tar:
        assert {"1.JPG", "2.jpg"} <= set(tar.getnames())
    found = get_val_dataset(
        tmp_path / "out", split_part="train", worker_config=INLINE, batch_size=None
    )
    assert [each.caption for each in found] == [f"photo {n}" for n in range(6)]


def test_parts_that_differ_only_in_case_are_not_written():
    with pytest.raises(ConfigError, match="differ only in case"):
        encode_sample({"__key__": "a", "jpg": b"1", "JPG": b"2"})


def test_of_parts_that_differ_only_in_case_the_one_that_is_meant_comes_first():
    sample = CrudeSample({"__key__": "a", "JPG": 1, "jpg": 2, "__JPG__": 3})
    assert [sample["jpg"], sample["JPG"], sample["Jpg"]] == [2, 1, 1]
    assert FieldMap.parse({"x": "jpg", "y": "JPG"}).apply(dict(sample)) == {"x": 2, "y": 1}
    assert sample.pop("jpg") == 2
    assert sample.pop("jpg") == 1
    assert sample.pop("jpg", None) is None
    assert find_part(sample, "__key__") is None
    with pytest.raises(KeyError, match="png"):
        sample["png"]
    with pytest.raises(KeyError, match="png"):
        sample.pop("png")
