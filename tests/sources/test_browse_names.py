from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from energon.sources.tree import MARK, MAX_BYTES, escape_name, mark_name, unescape_name

names = st.text(st.characters(codec="utf-8") | st.sampled_from("./%~\0" + "\udcff"), max_size=20)


@given(names)
def test_a_name_stands_for_itself_and_leads_nowhere(name):
    escaped = escape_name(name)
    assert escaped not in ("", ".", "..")
    assert not set(escaped) & set("/\0")
    assert unescape_name(escaped) == name


@given(names)
def test_usual_names_stay_as_they_are(name):
    if name not in ("", ".", "..") and not set(name) & set("%/\0"):
        assert escape_name(name) == name


@given(names, names)
def test_different_names_stay_different(one, other):
    assert (escape_name(one) == escape_name(other)) == (one == other)


@given(names)
def test_every_name_in_the_file_system_stands_for_one_name_at_most(name):
    raw = unescape_name(name)
    assert raw is None or escape_name(raw) == name


@given(st.text(st.sampled_from("aé漢\udcff"), min_size=200, max_size=400))
def test_long_names_are_cut_and_marked(name):
    escaped = escape_name(name)
    data = escaped.encode("utf-8", "surrogateescape")
    assert len(data) <= MAX_BYTES
    if len(name.encode("utf-8", "surrogateescape")) > MAX_BYTES:
        assert MARK in escaped
        assert unescape_name(escaped) is None
        assert escaped != escape_name(name + "x")


@given(names, st.sampled_from(["2", "file"]))
def test_a_marked_name_is_that_of_nothing_else(name, mark):
    assert unescape_name(mark_name(escape_name(name), mark)) is None
