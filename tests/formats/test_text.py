from __future__ import annotations

import json

import pytest

from energon.errors import FormatError
from energon.formats.text import parse_json
from energon.limits import DOCUMENT_DEPTH


@pytest.mark.parametrize("value", [1, "[[[", {"a": [1, {"b": None}]}, [[]] * 1000, []])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_reads_what_json_says(value, encode):
    assert parse_json(encode(json.dumps(value)), origin="f.json") == value


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("encode", [str, str.encode])
def test_reads_down_to_the_limit_and_no_deeper(start, end, encode):
    deepest = DOCUMENT_DEPTH.value
    parse_json(encode(f"{start * deepest}1{end * deepest}"), origin="f.json")
    for text in (f"{start * (deepest + 1)}1{end * (deepest + 1)}", start * 1_000_000):
        with pytest.raises(FormatError, match=r"^f.json: nested deeper.*LIMIT_DOCUMENT_DEPTH"):
            parse_json(encode(text), origin="f.json")


@pytest.mark.parametrize("text", ["", "{", "[1,]", "9" * 5000, b"\xff", "{} {}", b"\x00"])
def test_names_the_file_that_is_no_json(text):
    with pytest.raises(FormatError, match=r"^f.json: .*; look at it$"):
        parse_json(text, origin="f.json", hint="look at it")


def test_refuses_documents_that_are_larger_than_any(monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_DOCUMENT_BYTES", "4")
    assert parse_json("1234", origin="f.json") == 1234
    with pytest.raises(FormatError, match=r"5 bytes.*ENERGON_LIMIT_DOCUMENT_BYTES"):
        parse_json("12345", origin="f.json")
