from __future__ import annotations

import json
from functools import partial

import pytest

from energon.errors import ConfigError
from energon.inspect.where import Where
from energon.sources.tree import BrowsedFile, MemoryFile

ABOUT = {
    "width": 640,
    "label": "cat",
    "meta": {"tags": ["a", "b"], "length": 7},
    "ok": True,
    "none": None,
}


def sample(**parts):
    return {
        name.replace("_", "."): BrowsedFile(partial(MemoryFile, "x", data), 0, len(data))
        for name, data in parts.items()
    }


SAMPLE = sample(
    JPG=b"x" * 1500, json=json.dumps(ABOUT).encode(), left_png=b"", bad=b"{", said_json=b'"a cat"'
)


@pytest.mark.parametrize(
    "text",
    [
        *("has:jpg", "lacks:txt", "has:left.png", "jpg.size>1.4kB", "jpg.size<=1500", "", "  "),
        *("json.width>=640", "json.width<640.5", "json.label=cat", "json.label!=dog"),
        *("json.meta.tags.1=b", "json.ok=true", "json.none=null", "json.width!=wide"),
        *("has:jpg json.width==640", "left.png.size=0", "json.label.length=3"),
        *("'said.json.value=a cat'", "said.json.value.length>4", "json.meta.length=7"),
    ],
)
def test_matches(text):
    assert Where(text)(SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        *("has:txt", "lacks:jpg", "jpg.size>2kB", "txt.size<5", "json.width>640", "json.label=dog"),
        *("json.nothing=1", "json.meta.tags.2=b", "json.meta.tags.x=b", "json.width=wide"),
        *("bad.field=1", "txt.field=1", "has:jpg has:txt", "json.label.x=1"),
        *("json.label.length>3", "json.width.length=3", "said.json.value.x=1"),
    ],
)
def test_does_not_match(text):
    assert not Where(text)(SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        *("jpg", "has:", "json.a", "jpg.size>big", ">5", "json>5", "a.=1", "jpg.width>="),
        *("json.width>>3", "json.width=>3", "json.width<>3", "has:a " * 1000),
    ],
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match="expected"):
        Where(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("jpg.widht>5", "JPG.widht: conditions on JPG can use size, width, height, ratio"),
        ("jpg.width=wide", "JPG.width: expected a number, not 'wide'"),
    ],
)
def test_what_parts_of_a_kind_cannot_have_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        Where(text)(SAMPLE)
