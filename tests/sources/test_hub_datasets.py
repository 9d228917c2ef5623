"""Datasets of the Hugging Face Hub, read through their Parquet files."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon import ConfigError, DatasetNotFoundError, get_train_dataset
from energon.errors import FormatError
from energon.formats.parquet import parse_card
from energon.io.files import forget_stores
from energon.metadataset.kind import dataset_kind
from energon.sources.source import SampleSelection
from energon.sources.tables.parquet import ParquetOptions, ParquetSource
from tests.commands import run
from tests.servers.hub import hub
from tests.sources.reads import read_samples
from tests.sources.tables.test_parquet import Encoder, numbers, write_rows
from tests.task_encoder.runs import config

ADDRESS = "hf://datasets/me/texts"
CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.parquet
  - split: validation
    path: [en/val-*]
- config_name: de
  data_dir: de
---
# Texts
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / ".gitattributes").write_text("*.parquet filter=lfs")
    with hub(folder, "me/texts") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("ENERGON_STORAGE_CACHE_DIR", str(tmp_path / "cache"))
        forget_stores()
        yield folder
    forget_stores()


@pytest.fixture
def with_configs(repository):
    (repository / "README.md").write_text(CARD)
    write_rows(repository / "en/train-00000.parquet", range(8))
    write_rows(repository / "en/val-00000.parquet", range(8, 11))
    write_rows(repository / "de/0.parquet", range(20, 25))
    return repository


def test_a_dataset_is_read_through_its_parquet_files(repository):
    names = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    for part in range(2):
        rows = {"text": [f"text {n}" for n in range(6)], "label": [n % 2 for n in range(6)]}
        about = {"huggingface": json.dumps({"info": {"features": names}})}
        path = repository / f"data/train-{part:05}-of-00002.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(rows).replace_schema_metadata(about), path, row_group_size=4)
    assert dataset_kind(ADDRESS) == "parquet"
    sample = read_samples(ParquetSource(ADDRESS), np.array([7]))[0]
    assert (sample["__key__"], sample["label_name"]) == ("data/train-00001-of-00002/1", "dog")
    dataset = get_train_dataset(
        ADDRESS, worker_config=config(), batch_size=4, task_encoder=Encoder(), repeat=False
    )
    texts = [text for batch in dataset for text in batch.text]
    assert sorted(texts) == sorted(2 * [f"text {n}" for n in range(6)])


def test_splits_may_have_any_name(repository):
    for split, rows in (("train_sft", range(5)), ("test_sft", range(5, 8)), ("train_gen", [9])):
        write_rows(repository / f"data/{split}-00000-of-00001.parquet", rows)
    assert numbers(ParquetSource(ADDRESS, SampleSelection("train_sft"))) == [*range(5)]
    assert numbers(ParquetSource(ADDRESS, SampleSelection("test_sft"))) == [5, 6, 7]
    with pytest.raises(ConfigError, match="no split 'train', only test_sft, train_gen, train_sft"):
        ParquetSource(ADDRESS)


def test_the_card_says_which_files_are_which_split(with_configs):
    for address in (ADDRESS, with_configs):
        english = ParquetOptions(config="en")
        assert numbers(ParquetSource(address, options=english)) == [*range(8)]
        validation = ParquetSource(address, SampleSelection("val"), options=english)
        assert numbers(validation) == [8, 9, 10]
        assert numbers(ParquetSource(address, options=ParquetOptions(config="de"))) == [
            *range(20, 25)
        ]
        with pytest.raises(ConfigError, match=r"has the configurations en, de; choose one"):
            ParquetSource(address)
        with pytest.raises(ConfigError, match="no configuration 'fr', only en, de"):
            ParquetSource(address, options=ParquetOptions(config="fr"))
        with pytest.raises(
            ConfigError, match="no split 'test', only train, validation, according to its card"
        ):
            ParquetSource(address, SampleSelection("test"), options=english)
    about = json.loads(run("info", ADDRESS, "--json").output)
    assert {name: split["samples"] for name, split in about["splits"].items()} == {
        "en/train": 8,
        "en/validation": 3,
        "de/train": 5,
    }
    read = {"config": "de", "columns": ["n"]}
    blend = {"splits": {"train": {"path": ADDRESS, "read": read}}}
    dataset = get_train_dataset(blend, worker_config=config(), batch_size=5, repeat=False)
    assert sorted(next(iter(dataset))["n"]) == [*range(20, 25)]


def test_one_configuration_is_the_default(with_configs):
    card = CARD.replace("config_name: de", "config_name: de\n  default: true")
    (with_configs / "README.md").write_text(card)
    assert numbers(ParquetSource(ADDRESS)) == [*range(20, 25)]


def test_copies_that_the_hub_keeps_are_read(repository):
    (repository / "rows.json").write_text("[]")
    with pytest.raises(
        DatasetNotFoundError, match=f"Parquet copies of them: {ADDRESS}@refs/convert"
    ):
        dataset_kind(ADDRESS)
    write_rows(repository / "default/train/0000.parquet", range(4))
    write_rows(repository / "default/test/0000.parquet", range(4, 6))
    copies = f"{ADDRESS}@refs/convert/parquet"
    assert numbers(ParquetSource(copies, SampleSelection("test"))) == [4, 5]
    assert numbers(ParquetSource(f"{copies}/default/train")) == [*range(4)]


def test_patterns_of_a_card_that_match_no_file_are_reported(with_configs):
    for files in (
        "data_files: data/x-*",
        "data_dir: data/x-*",
        "data_files: [{split: train, path: ['**/*', data/x-*]}]",
    ):
        card = f"---\nconfigs: [{{config_name: a, {files}}}]\n---\n"
        (with_configs / "README.md").write_text(card)
        problem = r"its card assigns 'data/x-.*' to the split 'train', but none of its . Parquet f"
        with pytest.raises(DatasetNotFoundError, match=problem):
            ParquetSource(with_configs)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("# Texts\n---\nconfigs: []\n---\n", 0),
        ("---\nlicense: mit\n---\n", 0),
        ("---\nconfigs:\n- config_name: a\n  data_files: '*.parquet'\n---", 1),
        ("---\nconfigs:\n- config_name: a\n  data_files: [a, b]\n- config_name: b\n---", 1),
    ],
)
def test_cards_say_much_or_nothing(text, count):
    assert len(parse_card(text, origin="README.md")) == count


@pytest.mark.parametrize(
    "configs", ["3", "[{data_files: x}]", "[{config_name: a, data_files: [1]}]"]
)
def test_cards_that_make_no_sense_are_reported(configs):
    with pytest.raises(FormatError, match=r"README\.md: configs: expected a list of"):
        parse_card(f"---\nconfigs: {configs}\n---\n", origin="README.md")
