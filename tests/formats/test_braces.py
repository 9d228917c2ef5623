from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon.errors import ConfigError
from energon.formats.meta.braces import collapse_braces, escape_braces, expand_all, expand_braces

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


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a{1..2", "'{' at 1 is never closed"),
        ("{a,{b,c}", "'{' at 0 is never closed"),
        ("{a}b}", "'}' at 4 is unmatched"),
        ("{" * 10_000 + "a,b" + "}" * 10_000, "too deeply"),
    ],
)
def test_braces_that_do_not_pair_are_refused(pattern, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        expand_braces(pattern)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("x{,.bak}", ["x", "x.bak"]),
        ("p{2.{5..7},3.{2,3}}", ["p2.5", "p2.6", "p2.7", "p3.2", "p3.3"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{2..-1}", ["2", "1", "0", "-1"]),
        ("{-01..1}", ["-01", "000", "001"]),
        ("{0..10..5}", ["0", "5", "10"]),
        ("{10..0..-5}", ["10", "5", "0"]),
        ("{a..g..2}", ["a", "c", "e", "g"]),
        ("{c..a}", ["c", "b", "a"]),
        ("{C..A}", ["C", "B", "A"]),
        ("{a},b{c,d}", ["{a},bc", "{a},bd"]),
        ("{a{b,c}}", ["{ab}", "{ac}"]),
        ("{}{a,}", ["{}a", "{}"]),
        (r"{a\,b,c\}}\n", ["a,bn", "c}n"]),
    ],
)
def test_braces_mean_what_they_mean_in_a_shell(pattern, names):
    assert expand_braces(pattern) == names


_words = st.sampled_from(["a", "b1", "{2..4}", "{08..11}", "{3..-3..2}", "{a..e..2}", "{c..a}"])
_patterns = st.recursive(
    _words,
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(",".join).map("{{{}}}".format)
        | st.lists(inner, min_size=2, max_size=3).map("".join)
        | inner.map("{{{}}}".format)
    ),
    max_leaves=5,
)


@given(_patterns)
def test_a_shell_expands_to_the_same(pattern):
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {pattern}"], capture_output=True, text=True, check=True
    )
    assert expand_braces(pattern) == done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        "{0..9}" * 30,
        "{,}" * 60,
        "{a}" * 400_000,
        "{0..999999999999999999999999999999}",
        "{0..99999}{0..99999}",
        "{1..1000000}{a,b}",
        "x" * 1_000_000 + "{0..999}",
        "{" + "{0..999}," * 1001 + "}",
        "{" + "9" * 5000 + "..1}",
    ],
    ids=lambda pattern: pattern[:12],
)
def test_patterns_that_stand_for_too_much_are_refused_before_they_are_expanded(pattern):
    with pytest.raises(ConfigError, match=r"^pattern '.{1,80}': (expands to more than|a number)"):
        expand_braces(pattern)


def test_the_patterns_of_a_document_have_one_limit(monkeypatch):
    monkeypatch.setenv("ENERGON_LIMIT_BRACE_NAMES", "100")
    assert len(expand_all(["{0..49}", "{0..48}", "a"])) == 100
    for patterns in (["{0..49}", "{0..49}", "a{b,c}"], ["{0..100}"], ["a", *["{b,c}"] * 50]):
        with pytest.raises(ConfigError, match=r"more than 100 names.*ENERGON_LIMIT_BRACE_NAMES"):
            expand_all(patterns)
    # What is written out is no more than the document itself.
    assert len(expand_all(["a"] * 1000)) == 1000
