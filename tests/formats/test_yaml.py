from __future__ import annotations

import copy
import pickle

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon.errors import FormatError
from energon.formats.meta import yaml
from energon.formats.meta.yaml import dump_yaml, load, plain, where
from energon.limits import DOCUMENT_DEPTH


@pytest.fixture(params=["libyaml", "pure"], autouse=True, scope="module")
def parser(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pure":
            patch.setattr(yaml, "_parser_class", lambda: pyyaml.SafeLoader)
        yield


def error(text: str | bytes) -> str:
    with pytest.raises(FormatError) as info:
        load(text, origin="f.yaml")
    return str(info.value)


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "---\n", b"", "~", "\ufeff"])
def test_nothing_is_none(text):
    assert load(text, origin="f.yaml") is None


def test_an_empty_value_is_none():
    assert load("a:\nb:\n- c:\n-\n", origin="f.yaml") == {"a": None, "b": [{"c": None}, None]}


def test_remembers_the_place_of_everything():
    document = load("# head\na: 1\nb:\n  - x\n  -\n    y: 2\n    z: 3\n", origin="f.yaml")
    assert (document.mark, document.marks) == ((2, 1), {"a": (2, 1), "b": (3, 1)})
    assert (document["b"].mark, document["b"].marks) == ((4, 3), [(4, 5), (6, 5)])
    assert where(document, "b") == "f.yaml:3:1"
    assert where(document["b"], 1) == "f.yaml:6:5"
    assert where(document["b"][1]) == "f.yaml:6:5"
    assert where(document["b"][1], "z") == "f.yaml:7:5"
    assert where(document["b"][1], "absent") == "f.yaml:6:5"


def test_what_was_not_loaded_has_no_place():
    assert where({"a": 1}, "a") == "document"


def test_a_loaded_document_can_be_copied_and_pickled():
    document = load("a: [1, {b: 2}]", origin="f.yaml")
    for other in (copy.deepcopy(document), pickle.loads(pickle.dumps(document))):
        assert other == document
        assert where(other["a"][1], "b") == "f.yaml:1:9"


def test_plain_makes_builtins():
    value = plain(load("a: [1, {b: 2}]", origin="f.yaml"))
    assert type(value) is dict
    assert type(value["a"]) is list
    assert type(value["a"][1]) is dict


@pytest.mark.parametrize("text", ["'12'", '"12"', "|-\n  12", ">-\n  12"])
def test_quotes_and_blocks_make_text(text):
    assert load(f"a: {text}", origin="f.yaml") == {"a": "12"}


def test_aliases_and_merge_keys_work():
    document = load(
        "base: &base {a: 1, b: 2}\nmore: &more {b: 3, c: 4}\n"
        "x:\n  b: 0\n  <<: [*base, *more]\ny: *base\nz: {<<: *more, d: 5}\n",
        origin="f.yaml",
    )
    assert document["x"] == {"b": 0, "a": 1, "c": 4}
    assert document["y"] == {"a": 1, "b": 2}
    assert document["z"] == {"b": 3, "c": 4, "d": 5}
    assert where(document["x"], "c") == "f.yaml:2:20"
    assert where(document["x"], "b") == "f.yaml:4:3"


def test_an_anchor_may_be_set_anew():
    assert load("[&a 1, *a, &a 2, *a]", origin="f.yaml") == [1, 1, 2, 2]


def test_a_quoted_merge_key_is_a_key():
    assert load("'<<': 1", origin="f.yaml") == {"<<": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3:1: duplicate key 'a', first in line 1"),
        ("a: 1\n'a': 3\n", "f.yaml:2:1: duplicate key 'a'"),
        ("a:\n  - {b: 1, b: 2}", "f.yaml:2:12: duplicate key 'b'"),
        ("a: !!str 1", "f.yaml:1:4: tag 'tag:yaml.org,2002:str'"),
        ("a: !!python/name:os.system x", "f.yaml:1:4: tag"),
        ("a: !x [1]", "f.yaml:1:4: tag '!x'"),
        ("a: ! 1", "f.yaml:1:4: tag '!'"),
        ("a: *b", "f.yaml:1:4: alias *b has no anchor &b before it"),
        ("a: &a [1, *a]", "f.yaml:1:11: alias *a is inside the value that it refers to"),
        ("? [1]\n: 2", "f.yaml:1:3: a key must be a scalar"),
        ("a: &a [1]\n*a : 2", "f.yaml:2:1: a key must be a scalar"),
        ("<<: 1", "f.yaml:1:5: '<<' merges mappings"),
        ("<<: [{a: 1}, 2]", "f.yaml:1:5: '<<' merges mappings"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: a second document"),
        ("a: b: c", "f.yaml:1:5: not valid YAML: mapping values are not allowed"),
        ("a: b: c", "needs quotes"),
        ("a:\n\tb: 1", "indent with spaces"),
        ("a: [1,\n\nb: {2\n", "that starts in line 3"),
        ("a: 1\nb: \x07", "f.yaml:2:4: "),
        (b"a: 1\nb: \xff", "f.yaml:2: byte 0xff is not UTF-8"),
        ("a: \ud800", "f.yaml"),
    ],
)
def test_refuses_with_the_place(text, message):
    assert message in error(text)


def test_refuses_deep_nesting(monkeypatch):
    deepest = DOCUMENT_DEPTH.value
    load("[" * deepest + "]" * deepest, origin="f.yaml")
    too_deep = "[" * (deepest + 1) + "]" * (deepest + 1)
    assert "nested deeper than" in error(too_deep)
    assert "ENERGON_LIMIT_DOCUMENT_DEPTH" in error("[" * 1_000_000)
    monkeypatch.setenv("ENERGON_LIMIT_DOCUMENT_DEPTH", "150")
    load(too_deep, origin="f.yaml")


def test_refuses_deep_nesting_by_aliases():
    half = "[" * 60 + "{}" + "]" * 60
    text = f"a: &a {half}\nb: &b {half.format('*a')}\n"
    assert error(text).startswith("f.yaml:2:")


def test_refuses_aliases_that_multiply():
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        lines.append(f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]")
    assert "aliases expand to more than" in error("\n".join(lines))
    merged = ["m0: &m0 {a: 1, b: 2, c: 3}"]
    for level in range(1, 30):
        merged.append(f"m{level}: &m{level} {{<<: [{', '.join([f'*m{level - 1}'] * 10)}]}}")
    assert "ENERGON_LIMIT_ALIASED_VALUES" in error("\n".join(merged))


def test_refuses_long_lists_of_mappings_but_not_of_text(monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_LISTED_VALUES", "3")
    assert len(load("[[a, b, c], {d: [e, f]}, [g]]", origin="f.yaml")) == 3
    assert error("- {}\n- []\n- {}\n- x\n- {}\n").startswith("f.yaml:5:3: lists have more than 3")


def test_refuses_documents_that_are_larger_than_any(monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_DOCUMENT_BYTES", "10")
    assert load("a: 1234567", origin="f.yaml") == {"a": 1234567}
    assert "ENERGON_LIMIT_DOCUMENT_BYTES" in error("a: 12345678")


def test_dump_writes_blocks_in_order():
    data = {
        "split_parts": {"train": ["shards/{000..010}.tar"], "val": []},
        "exclude": [{"a": 1, "b": [[1, 2], {}]}],
        "path": "msc://bucket/x",
        "flag": "yes",
    }
    assert dump_yaml(data) == (
        "split_parts:\n  train:\n    - shards/{000..010}.tar\n  val: []\n"
        "exclude:\n  - a: 1\n    b:\n      -\n        - 1\n        - 2\n      - {}\n"
        'path: msc://bucket/x\nflag: "yes"\n'
    )


@pytest.mark.parametrize("value", [b"x", object(), {1, 2}])
def test_dump_refuses_what_yaml_does_not_have(value):
    with pytest.raises(TypeError, match="as YAML"):
        dump_yaml({"a": value})


def test_dump_refuses_half_characters():
    with pytest.raises(FormatError, match="UTF-8"):
        dump_yaml("\ud800")


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("0123456789eE+-._:xinfIa# {}[],&*!|>'\"%@`~\n\t", max_size=8),
    st.sampled_from(
        ["null", "On", "n", "...", "---", "<<", "=", ".inf", "1e5", "0x1", "1:2", "a: b"]
    ),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(DATA)
def test_dump_and_load_are_inverse_and_other_readers_agree(data):
    text = dump_yaml(data)
    assert load(text, origin="f.yaml") == data
    assert pyyaml.load(text, Loader=getattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader)) == data


@settings(max_examples=50, deadline=None)
@given(st.text("ab:-[]{}&*!<'\"#,\n 1", max_size=40))
def test_any_text_loads_or_is_a_format_error(text):
    message = "f.yaml:"
    try:
        load(text, origin="f.yaml")
    except FormatError as exc:
        message = str(exc)
    assert message.startswith("f.yaml:")
