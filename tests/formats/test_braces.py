from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.braces import collapse_braces, escape_braces, expand_braces

names = st.builds(
    "{}{:0{}}{}".format,
    st.sampled_from(["a_", "b/", "x_1_", "{0..1}", "y{", "z}", "c\\", "d,"]),
    st.integers(0, 120),
    st.integers(1, 4),
    st.sampled_from([".tar", "_2.tar"]),
)


@given(st.lists(names, max_size=30))
def test_collapsed_names_expand_to_the_same_in_the_same_order(shards):
    patterns = collapse_braces([escape_braces(shard) for shard in shards])
    assert [name for pattern in patterns for name in expand_braces(pattern)] == shards


@given(st.text("{}\\,.01ab", max_size=12))
def test_an_escaped_name_stands_for_itself(name):
    assert expand_braces(escape_braces(name)) == [name]


def test_patterns_stay_as_they_are():
    patterns = ["a_{0..9}.tar", "a_10.tar", "b_{x,y}.tar"]
    assert collapse_braces(patterns) == patterns


def test_runs_become_one_pattern():
    shards = [f"part-{n:05}.tar" for n in range(10_000)]
    assert collapse_braces(shards) == ["part-{00000..09999}.tar"]


def test_braces_that_do_not_pair_are_refused():
    with pytest.raises(ConfigError, match="pattern"):
        expand_braces("a{1..2")
