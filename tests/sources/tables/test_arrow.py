from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from energon import ConfigError, DatasetNotFoundError, EmptyDatasetError, get_train_dataset
from energon.errors import FormatError, TruncatedError
from energon.metadataset.kind import dataset_kind
from energon.sources.source import SampleSelection
from energon.sources.tables.arrow import ArrowSource
from energon.sources.tables.row_kind import RowOptions
from tests.commands import run
from tests.datasets import jpeg
from tests.sources.reads import read_samples
from tests.task_encoder.runs import config

N = 60


def make(count, start=0):
    import datasets  # which takes a second, in each process that collects tests

    rows = {
        "n": list(range(start, start + count)),
        "text": [f"text {n}" for n in range(start, start + count)],
        "label": [n % 2 for n in range(count)],
    }
    labels = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(
        {"n": datasets.Value("int64"), "text": datasets.Value("string"), "label": labels}
    )
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make(N).save_to_disk(folder, num_shards=3)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "data"))


def numbers(source, ordinals=None):
    found = read_samples(source, np.arange(len(source)) if ordinals is None else np.array(ordinals))
    return [sample["n"] for sample in found]


def test_rows_come_by_number_with_the_names_of_classes(folder):
    assert dataset_kind(folder) == "arrow"
    source = pickle.loads(pickle.dumps(ArrowSource(folder)))
    ordinals = np.random.default_rng(0).integers(0, N, 200).tolist()
    assert numbers(source, ordinals) == ordinals
    sample = read_samples(source, np.array([25]))[0]
    assert (sample["__key__"], sample["text"]) == ("data-00001-of-00003/5", "text 25")
    assert (sample["label"], sample["label_name"]) == (1, "dog")
    assert source.find("data-00001-of-00003/5") == [25]
    with pytest.raises(IndexError, match="0 to 59, not 60"):
        read_samples(source, np.array([60]))


def test_splits_are_those_of_the_dataset(tmp_path):
    import datasets

    parts = {"train": make(8), "validation": make(3, 100)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert dataset_kind(tmp_path / "d") == "arrow"
    assert numbers(ArrowSource(tmp_path / "d", SampleSelection("val"))) == [100, 101, 102]
    assert len(ArrowSource(tmp_path / "d")) == 8
    with pytest.raises(ConfigError, match="no split 'test', only train, validation"):
        ArrowSource(tmp_path / "d", SampleSelection("test"))
    with pytest.raises(ConfigError, match="has the splits train, validation; drop `split`"):
        ArrowSource(tmp_path / "d", options=RowOptions(split="9,1"))
    about = json.loads(run("info", tmp_path / "d", "--json").output)
    assert {name: split["samples"] for name, split in about["splits"].items()} == {
        "train": 8,
        "validation": 3,
    }


def test_columns_and_types_may_differ_and_bad_values_fail_alone(tmp_path, caplog):
    offsets, text = np.array([0, 1, 3], np.int32), b"a\xff\xfe"
    bad = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    tables = [
        pa.table({"n": pa.array([0, 1], pa.int32())}),
        pa.table({"n": [2, 3], "text": bad, "list": [["x"], []]}),
    ]
    for number, table in enumerate(tables):
        with pa.ipc.new_stream(tmp_path / f"{number}.arrow", table.schema) as stream:
            stream.write_table(table)
    names = [{"filename": f"{number}.arrow"} for number in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": names}))
    dataset = get_train_dataset(tmp_path, worker_config=config(), batch_size=1, repeat=False)
    read = sorted((b["n"][0], b["text"][0], b["list"][0]) for b in dataset)
    assert read == [(0, None, None), (1, None, None), (2, "a", ["x"])]
    assert "1.arrow: row 1 has a value in column 'text' that cannot be read" in caplog.text


def test_a_ratio_deals_rows_where_there_are_no_splits(folder):
    options = RowOptions(split="9,1")
    assert numbers(ArrowSource(folder, SampleSelection("val"), options=options)) == [*range(54, 60)]
    with pytest.raises(ConfigError, match="no split 'val', only train"):
        ArrowSource(folder, SampleSelection("val"))


def test_images_are_decoded(tmp_path):
    import datasets

    rows = {"image": [{"bytes": jpeg(n), "path": None} for n in range(6)]}
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d")
    batch = next(iter(get_train_dataset(tmp_path / "d", worker_config=config(), batch_size=4)))
    assert batch["image"].shape == (4, 3, 8, 12)
    result = run("lint", tmp_path / "d", "--num-workers", 1)
    assert (result.exit_code, result.output) == (0, "6 samples: no problems\n")


def test_the_index_of_pandas_is_not_listed_among_columns(tmp_path):
    import datasets

    rows = {"n": [1, 2], "__index_level_0__": [7, 8]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "data")
    assert "columns: n (int64)\n" in run("info", tmp_path / "data").output
    (sample, _) = read_samples(ArrowSource(tmp_path / "data"), np.arange(2))
    assert "__index_level_0__" not in sample


def test_damaged_files_are_reported(folder):
    path = folder / "data-00001-of-00003.arrow"
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-200], b"PK" * 200):
        path.write_bytes(content)
        with pytest.raises(
            TruncatedError,
            match=r"data-00001-of-00003\.arrow: is not a complete "
            r"Arrow stream",
        ):
            ArrowSource(folder)
    path.unlink()
    with pytest.raises(
        DatasetNotFoundError, match=r"does not exist, but state\.json in its folder"
    ):
        ArrowSource(folder)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("[]", "expected a list of files, found None"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "expected a list of files"),
        ('{"_data_files": [{}]}', "expected a list of files"),
        ('{"_data_files": 3}', "expected a list of files, found 3"),
        ("{", r"state\.json"),
        ('{"_data_files": [], "_indices_data_files": [{}]}', "call flatten_indices"),
    ],
)
def test_a_state_that_makes_no_sense_is_reported(folder, state, problem):
    (folder / "state.json").write_text(state)
    with pytest.raises(FormatError, match=problem):
        ArrowSource(folder)


@pytest.mark.parametrize("state", [None, "", "{", "[]", "{}"])
def test_a_folder_without_a_valid_state_is_not_taken_for_tables(folder, state):
    if state is None:
        (folder / "state.json").unlink()
    else:
        (folder / "state.json").write_text(state)
    result = run("info", folder)
    assert result.exit_code == 2
    assert f"{folder} has Arrow files, but no valid state.json" in result.output
    assert "energon pack" not in result.output


def test_an_arrow_file_alone_leads_to_its_folder(folder):
    assert f"is an Arrow file; name its folder, {folder}" in (
        run("info", folder / "data-00000-of-00003.arrow").output
    )


def test_nothing_to_read_and_other_places_are_errors(tmp_path, folder):
    make(0).save_to_disk(tmp_path / "empty")
    with pytest.raises(EmptyDatasetError, match="has 0 of 0 rows"):
        ArrowSource(tmp_path / "empty")
    (folder / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(EmptyDatasetError, match="in 0 files"):
        ArrowSource(folder)
    with pytest.raises(ConfigError, match="must be on this machine; copy it, or train on"):
        ArrowSource("s3://bucket/data")
    (tmp_path / "empty" / "dataset_dict.json").write_text('{"splits": ["../data"]}')
    with pytest.raises(FormatError, match="expected the names of splits"):
        ArrowSource(tmp_path / "empty")
