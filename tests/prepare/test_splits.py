from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.meta.info import DatasetInfo
from energon.prepare.splits import (
    SplitRequest,
    parse_ratio,
    split_by_folder,
    split_by_pattern,
    split_by_ratio,
    split_dataset,
    split_samples_by_ratio,
)


@given(
    st.integers(1, 200),
    st.dictionaries(st.text(min_size=1), st.floats(0.01, 100), min_size=1, max_size=6),
)
def test_every_shard_is_in_one_split_and_ratios_are_met(count, ratios):
    shards = [f"{n:03}.tar" for n in range(count)]
    parts = split_by_ratio(shards, ratios)
    assert [shard for part in parts.values() for shard in part] == shards
    if count >= len(ratios):
        assert set(parts) == set(ratios)
    total = sum(ratios.values())
    for name, found in parts.items():
        assert abs(len(found) - count * ratios[name] / total) <= len(ratios)


def test_no_shard_is_lost_by_rounding():
    parts = split_by_ratio([str(n) for n in range(10)], {"train": 7, "val": 2, "test": 1})
    assert {name: len(found) for name, found in parts.items()} == {"train": 7, "val": 2, "test": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8,1,1", {"train": 8, "val": 1, "test": 1}),
        ("1", {"train": 1}),
        ("train:0.9, holdout:0.1", {"train": 0.9, "holdout": 0.1}),
        ("1,0,0", {"train": 1, "val": 0, "test": 0}),
    ],
)
def test_ratios_are_numbers_or_names_with_numbers(text, expected):
    assert parse_ratio(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,2,3,4", "train:x", "a:1,a:2", "0,0", "-1,2", "a:1,2"])
def test_other_ratios_are_refused(text):
    with pytest.raises(ConfigError, match="split ratio"):
        parse_ratio(text)


def test_patterns_match_the_beginning_of_a_path():
    shards = ["shards/train_0.tar", "shards/train_1.tar", "shards/val_0.tar", "x/shards/train_.tar"]
    assert split_by_pattern(shards, ["train:shards/train_.*", "val:shards/val_.*"]) == {
        "train": shards[:2],
        "val": shards[2:3],
    }
    assert split_by_pattern(shards, ["a:shards/{train,val}_0.tar"]) == {"a": [shards[0], shards[2]]}
    assert split_by_pattern(shards, [r"a:shards/[a-z]{5}_\d.*"]) == {"a": shards[:2]}


def test_numbers_in_braces_are_names_if_a_zero_leads():
    shards = [f"{n:03}.tar" for n in range(11)]
    assert split_by_pattern(shards, ["a:{002,010}"]) == {"a": [shards[2], shards[10]]}
    assert split_by_pattern(shards, ["a:0{2}[1-9]"]) == {"a": shards[1:10]}
    assert split_by_pattern(shards, ["a:{001..003}"]) == {"a": shards[1:4]}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["train:.*", "val:b"], "1 shard is in several splits, the first of them b.tar in train"),
        (["train:[ab]", "val:[bc]", "test:b"], "b.tar in train and val and test, so these share"),
        (["train:[ab]", "train:b", "val:c"], None),
    ],
)
def test_shards_in_several_splits_are_reported(caplog, patterns, message):
    info = DatasetInfo({"a.tar": 1, "b.tar": 1, "c.tar": 1})
    split_dataset(info, SplitRequest(parts=patterns), None)
    if message is None:
        assert not caplog.records
    else:
        (record,) = caplog.records
        assert message in record.getMessage()


@pytest.mark.parametrize("pattern", ["train", ":x", "train:[", "train:nothing.*"])
def test_patterns_that_match_nothing_are_refused(pattern):
    with pytest.raises(ConfigError, match="split part"):
        split_by_pattern(["a.tar"], [pattern])


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1),
)
def test_every_sample_is_in_one_split(counts, ratios):
    sizes = {f"{number}.tar": count for number, count in enumerate(counts)}
    parts, ranges = split_samples_by_ratio(sizes, ratios)
    dealt = []
    for name, shards in parts.items():
        for shard in shards:
            start, stop = ranges.get(name, {}).get(shard, (0, sizes[shard]))
            assert 0 <= start < stop <= sizes[shard]
            dealt += [(shard, sample) for sample in range(start, stop)]
    assert dealt == [(shard, n) for shard, count in sizes.items() for n in range(count)]
    if sum(counts) >= len(ratios):
        assert set(parts) == set(ratios)


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (["a/0", "a/1", "b/0"], {"a": ["a/0", "a/1"], "b": ["b/0"]}),
        (["x/a/0", "x/b/s/0", "x/b/1"], {"a": ["x/a/0"], "b": ["x/b/s/0", "x/b/1"]}),
        (["x/a/0", "x/a/1"], {"a": ["x/a/0", "x/a/1"]}),
    ],
)
def test_the_first_folder_that_differs_is_the_split(shards, expected):
    assert split_by_folder(shards) == expected


@pytest.mark.parametrize("shards", [["0", "1"], ["a/0", "1"], ["a/0", "a/b/1"]])
def test_shards_in_no_folder_of_their_own_are_refused(shards):
    with pytest.raises(ConfigError, match="in no folder"):
        split_by_folder(shards)


def test_a_ratio_as_text_is_refused_by_the_function():
    with pytest.raises(ConfigError, match=r"split_ratio='8,1,1': expected a ratio by name"):
        SplitRequest(ratio="8,1,1")
