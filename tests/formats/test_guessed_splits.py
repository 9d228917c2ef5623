"""Splits are guessed from the names of files and folders, by the words of `datasets`."""

from __future__ import annotations

import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon import WorkerConfig, get_train_dataset, get_val_dataset
from energon.errors import ConfigError
from energon.formats.meta.info import SPLIT_WORDS, splits_by_name
from tests.commands import run

ARGUMENTS = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": 1}
OTHER_WORDS = ("trainee", "latest", "value", "development", "holdout", "contest")
SEPARATORS = ("-", ".", "_", " ", "2017")


def write(path, columns):
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


def shapes_of(word):
    """Return names in which a word stands alone, among others, and within others."""
    ends = [f"{word}{separator}x" for separator in SEPARATORS]
    begins = [f"x{separator}{word}" for separator in SEPARATORS]
    return [word, f"{word}2017", f"00{word}", *ends, *begins, f"x{word}", f"{word}x"]


def guess_of_datasets(folder):
    from datasets.data_files import get_data_patterns

    (split,) = get_data_patterns(str(folder))
    return {"validation": "val"}.get(str(split), str(split))


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_name_tells_the_split_that_it_tells_datasets(tmp_path, is_folder):
    pytest.importorskip("datasets")
    for number, word in enumerate((*SPLIT_WORDS, *OTHER_WORDS[:2])):
        for shape in shapes_of(word)[number % 3 :: 3]:
            name = f"{shape}/0.csv" if is_folder else f"{shape}.csv"
            folder = tmp_path / f"of {name.replace('/', ' ')}"
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text("a\n1\n")
            (split,) = splits_by_name([name], by_file=True)
            assert (split or "train") == guess_of_datasets(folder), name


@pytest.mark.parametrize("word", [*SPLIT_WORDS, *(word.title() for word in SPLIT_WORDS)])
def test_case_does_not_matter(word):
    names = [f"{word}/0.jpg", "x/test/1.jpg", "train/2.jpg", "val/3.jpg"]
    splits = splits_by_name(names, by_file=False)
    assert names[0] in splits[SPLIT_WORDS[word.lower()]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.csv", "test.csv"], {"train": 1, "test": 1}),
        (["train2017/a.csv", "val2017/a.csv", "test2017/a.csv"], {"train": 1, "val": 1, "test": 1}),
        (["training_set/a.csv", "test.csv"], {"train": 1, "test": 1}),
        (["data/train/a.csv", "data/val/test.csv"], {"train": 1, "val": 1}),
        (["train-1.csv", "train-2.csv"], {"": 2}),
        (["trainee.csv", "latest.csv"], {"": 2}),
        (["test.csv"], {"test": 1}),
        (["a.csv", "a-test.csv"], {"train": 1, "test": 1}),
        (["train.csv", "test.csv", "extra.csv"], {"train": 1, "test": 1}),
        (["training_data/test/a.csv", "training_data/train/a.csv"], {"train": 1, "test": 1}),
        (["sft-00000-of-00001.csv", "dpo-00000-of-00001.csv"], {"sft": 1, "dpo": 1}),
        (["test-00000-of-00001.csv", "dpo-00000-of-00001.csv"], {"test": 1, "dpo": 1}),
    ],
)
def test_tables_are_in_the_split_that_their_names_tell(names, expected):
    splits = splits_by_name(names, by_file=True)
    assert {split: len(own) for split, own in splits.items()} == expected
    assert all(name in names for own in splits.values() for name in own)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bus/1.jpg", "train/2.jpg"], {"": 2}),
        (["bullet_train/1.jpg", "test_tube/1.jpg", "bus/1.jpg"], {"train": 1, "test": 1}),
        (["bus/1.jpg", "test_tube/2.jpg"], {"": 2}),
        (["bus/1.jpg", "test/2.jpg"], {"train": 1, "test": 1}),
        (["train/bullet_train/1.jpg", "val/train/2.jpg"], {"train": 1, "val": 1}),
        (["train_1.jpg", "test_1.jpg"], {"train": 1, "test": 1}),
        (["train_1.jpg", "test_1.jpg", "IMG_7.jpg"], {"": 3}),
        (["test1.jpg", "test2.jpg"], {"": 2}),
        (["cat/train_1.jpg", "cat/test_1.jpg"], {"train": 1, "test": 1}),
    ],
)
def test_media_are_in_the_split_that_their_folders_tell(names, expected):
    splits = splits_by_name(names, by_file=False)
    assert {split: len(own) for split, own in splits.items()} == expected


@pytest.mark.parametrize("word", SPLIT_WORDS)
@pytest.mark.parametrize("by_file", [True, False])
def test_no_file_of_val_or_test_is_in_train(word, by_file):
    named = [shape for shape in shapes_of(word)[:-2] if by_file or shape[0] != "x"]
    names = [f"{shape}/a.parquet" for shape in named]
    if by_file:
        names += [f"{shape}.parquet" for shape in named]
    splits = splits_by_name([*names, "train/a.parquet"], by_file=by_file)
    expected = SPLIT_WORDS[word]
    assert set(splits) == ({expected, "train"} if expected != "train" else {""})
    assert expected == "train" or sorted(splits[expected]) == sorted(names)


def test_parquet_files_of_other_splits_are_not_trained_on(tmp_path, caplog):
    write(tmp_path / "my_train.parquet", {"n": [1, 2]})
    write(tmp_path / "x-validation.parquet", {"n": [3]})
    with caplog.at_level(logging.INFO, "energon"):
        assert len(get_train_dataset(tmp_path, **ARGUMENTS, max_samples_per_sequence=1)) == 2
        assert len(get_val_dataset(tmp_path, **ARGUMENTS)) == 1
    (message,) = [each for each in caplog.messages if "splits by the names" in each]
    assert message.endswith(
        "train (1 file like my_train.parquet), val (1 file like x-validation.parquet)"
    )
    write(tmp_path / "extra.parquet", {"n": [4]})
    assert len(get_train_dataset(tmp_path, **ARGUMENTS, max_samples_per_sequence=1)) == 2
    assert "left out 1 file of no split like extra.parquet" in caplog.messages[-1]


def test_a_single_file_is_train_whatever_its_name(tmp_path):
    write(tmp_path / "validation.parquet", {"n": [1]})
    assert len(get_train_dataset(tmp_path / "validation.parquet", **ARGUMENTS)) == 1
    with pytest.raises(ConfigError, match="no split 'train', only val, according to the names"):
        get_train_dataset(tmp_path, **ARGUMENTS)


@pytest.mark.parametrize("command", ["info", "lint", "plan", "prepare", "preview"])
def test_commands_print_the_guess(tmp_path, command):
    for name in ("train2017", "val2017"):
        write(tmp_path / f"{name}/0.parquet", {"n": [1, 2]})
    result = run(command, tmp_path)
    assert "train (1 file like train2017/0.parquet), val (1 file like val2017" in result.stderr
    assert result.exit_code == 0
