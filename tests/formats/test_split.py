from __future__ import annotations

import json

import pytest

from energon.errors import ConfigError
from energon.formats.meta.info import Split, load_split


def write(root, text, name="split.yaml"):
    (root / ".nv-meta").mkdir(exist_ok=True)
    (root / ".nv-meta" / name).write_text(text)
    return root


def test_patterns_are_expanded_and_excluded_shards_left_out(tmp_path):
    write(
        tmp_path,
        "split_parts:\n  train: ['s_{0..3}.tar', other.tar]\n"
        "exclude: [s_1.tar, 's_2.tar/key', 's_{0..3}.tar/dir/key.1']\n",
    )
    split = load_split(tmp_path)
    assert split.shards("train") == ["s_0.tar", "s_2.tar", "s_3.tar", "other.tar"]
    assert ("s_2.tar", "key") in split.excluded_samples
    assert ("s_3.tar", "dir/key.1") in split.excluded_samples


def test_json_stands_in_for_yaml(tmp_path):
    write(tmp_path, json.dumps({"split_parts": {"train": ["a.tar"]}}), "split.json")
    assert load_split(tmp_path).shards("train") == ["a.tar"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "split_parts"),
        ("split_parts: {train: a.tar}", "lists of paths"),
        ("split_parts: {}\nexcludes: []", r"unknown keys \['excludes'\]"),
    ],
)
def test_other_documents_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_split(write(tmp_path, text))


def test_damaged_files_and_missing_ones_say_so(tmp_path):
    with pytest.raises(ConfigError, match="no such file.*energon prepare"):
        load_split(tmp_path)
    with pytest.raises(ConfigError, match="not JSON"):
        load_split(write(tmp_path, "{", "split.json"), "split.json")


def test_ranges_of_samples_are_read_back(tmp_path):
    split = Split(
        {"train": ["a.tar"], "val": ["a.tar", "b.tar"]},
        sample_ranges={"train": {"a.tar": (0, 5)}, "val": {"a.tar": (5, 8)}},
    )
    found = load_split(write(tmp_path, split.to_yaml()))
    assert found.sample_range("val", "a.tar", 8) == (5, 8)
    assert found.sample_range("val", "b.tar", 3) == (0, 3)
    with pytest.raises(ConfigError, match="samples 5 to 8 of a.tar, which has only 7"):
        found.sample_range("val", "a.tar", 7)


@pytest.mark.parametrize(
    "ranges",
    ["[]", "{val: 3}", "{val: {a.tar: [1]}}", "{val: {a.tar: [3, 2]}}", "{test: {a.tar: [0, 1]}}"],
)
def test_ranges_of_samples_that_make_no_sense_are_refused(tmp_path, ranges):
    text = f"split_parts: {{val: [a.tar]}}\nsample_ranges: {ranges}\n"
    if ranges == "[]":
        assert load_split(write(tmp_path, text)).sample_ranges == {}
        return
    with pytest.raises(ConfigError, match="sample_ranges"):
        load_split(write(tmp_path, text))


def test_a_folder_of_that_name_is_refused(tmp_path):
    (tmp_path / ".nv-meta/split.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="split.yaml: is a folder"):
        load_split(tmp_path)
