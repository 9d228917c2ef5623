from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.formats.meta import jsonl
from energon.formats.meta.jsonl import JsonlSplit, load_jsonl_index, parse_jsonl_split, scan_jsonl

OBJECTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3)
BLANK = st.sampled_from(["", " ", "\t", "\r", "  \r"])
LINES = st.lists(
    OBJECTS.map(json.dumps) | OBJECTS.map(lambda value: f"  {json.dumps(value)} \r") | BLANK
)


def scan(path):
    return np.concatenate(list(scan_jsonl(path))).tolist()


@given(lines=LINES, ended=st.booleans(), window=st.integers(1, 50))
def test_every_object_is_a_sample_and_blank_lines_are_none(tmp_path_factory, lines, ended, window):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    path.write_bytes(text.encode())
    expected = [json.loads(line) for line in lines if line.strip()]
    original, jsonl.SCAN_BYTES = jsonl.SCAN_BYTES, window
    try:
        if not expected:
            with pytest.raises(FormatError, match="has no samples"):
                scan(path)
            return
        offsets = scan(path)
    finally:
        jsonl.SCAN_BYTES = original
    data = path.read_bytes()
    assert offsets[0] == 0
    assert offsets[-1] == len(data)
    found = [json.loads(data[start:stop]) for start, stop in pairwise(offsets)]
    assert found == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1}\n[1]\n', ":2: .*found b'\\[1\\]'"),
        ('{"a": 1}\n\n{"a"\n', ":3"),
        ('{"a": 1}\n\ufeff{"a": 1}\n', ":2"),
        ("text", ":1"),
        ('{"a": 1}\n"}"', ":2"),
    ],
)
def test_what_is_no_object_is_refused_with_its_line(tmp_path, text, place):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(FormatError, match=place):
        scan(path)


def test_an_index_of_another_file_is_refused():
    data = np.array([0, 5, 9], "<u8").tobytes()
    assert load_jsonl_index(data, size=9, origin="x.jsonl").tolist() == [0, 5, 9]
    with pytest.raises(ShardChangedError, match="has 10 bytes, had 9"):
        load_jsonl_index(data, size=10, origin="x.jsonl")
    with pytest.raises(TruncatedError, match="not a complete index"):
        load_jsonl_index(data[:-1], size=9, origin="x.jsonl")
    with pytest.raises(FormatError, match="ascend"):
        load_jsonl_index(np.array([0, 5, 5, 9], "<u8").tobytes(), size=9, origin="x.jsonl")


def test_splits_survive_being_written():
    split = JsonlSplit({"train": (0, 90), "val": ("90%", "100%")}, ["7"])
    again = parse_jsonl_split(split.to_yaml(), origin="x.jsonl.split.yaml")
    assert again.split_parts == split.split_parts
    assert again.exclude == ["7"]
    assert again.bounds("val") == ("90%", "100%")
    with pytest.raises(
        ConfigError, match=r"x\.jsonl\.split\.yaml: there is no split 'vale'.*'val'"
    ):
        again.bounds("vale")


def test_without_a_file_of_splits_each_is_the_whole_file():
    assert parse_jsonl_split(None, origin="x").bounds("anything") == (0, "end")


@pytest.mark.parametrize(
    "text",
    [
        "- a",
        "split_parts: [1]",
        "split_parts: {train: [0]}",
        "split_parts: {train: [0, 1.5]}",
        "split_parts: {train: [0, 1]}\nother: 1",
        "split_parts: {train: [0, 1]}\nexclude: 7",
    ],
)
def test_splits_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="here: "):
        parse_jsonl_split(text, origin="here")
