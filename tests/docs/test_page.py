from __future__ import annotations

import types

import pytest

from tests.docs.markdown import anchors, find_blocks, links
from tests.docs.page import commands, matches, run_page


def run(text):
    main = types.ModuleType("__main__")
    run_page("page.md", text, main)
    return main


def fenced(language, text, *, marker=""):
    comment = f"<!-- {marker} -->\n" if marker else ""
    return f"{comment}```{language}\n{text}\n```\n"


def test_blocks_share_a_namespace_and_show_what_they_print():
    page = fenced("python", "x = 2") + "words\n" + fenced("python", "print(x, 'and', x + 1)")
    assert run(page + "\n" + fenced("text", "2 … 3")).x == 2


@pytest.mark.parametrize(
    "page",
    [
        fenced("python", "print(1)") + fenced("text", "2"),
        fenced("python", "1 / 0"),
        fenced("python", "x = 1", marker="raises ValueError"),
        fenced("python", "int('x')", marker="raises ValueError") + fenced("text", "ValueError: y"),
        fenced("console", "$ false"),
        fenced("console", "$ true", marker="fails"),
        fenced("console", "$ echo a\nb"),
        fenced("console", "echo a"),
        fenced("python", "1 / 0", marker="not run"),
        fenced("bash", "exit 1"),
    ],
)
def test_a_page_that_says_something_wrong_fails(page):
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
        run(page)


def test_tracebacks_show_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as caught:
        run("words\n\n" + fenced("python", "x = 1\n1 / 0"))
    assert caught.traceback[-1].lineno + 1 == 5
    assert str(caught.traceback[-1].path).endswith("page.md")


def test_what_is_shown_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(
        fenced("yaml", "# folder/a.yaml\nkey: 1")
        + fenced("console", "$ cat folder/a.yaml\n# …\nkey: 1\n$ echo one \\\n    two\none two")
        + fenced("python", "int('x')", marker="raises ValueError")
        + fenced("text", "ValueError: …'x'")
        + fenced("python", "# one.py\nprint(1)")
        + fenced("console", "$ python one.py\n1")
        + fenced("console", "$ echo wrong && false\nwrong", marker="fails")
        + fenced("python", "1 / 0", marker="not run: it needs two machines")
        + fenced("bash", "exit 1", marker="not run: it needs a third one")
        + fenced("json", "[]")
    )


def test_commands_are_told_from_what_they_print():
    assert commands("$ a \\\n  b\nc\n  d\n$ e\n") == [("a \\\n  b\n", "c\n  d\n"), ("e\n", "")]


@pytest.mark.parametrize(
    ("printed", "wanted", "expected"),
    [
        ("a b", "a b", True),
        ("a b  \n", "a b", True),
        ("a b c", "a … c", True),
        ("a\nb\nc", "a\n…\nc", True),
        ("a b", "a", False),
        ("a", "a b", False),
        ("a.b", "a?b", False),
    ],
)
def test_dots_stand_for_any_text(printed, wanted, expected):
    assert matches(printed, wanted) is expected


def test_finds_markers_lines_and_neighbours():
    blocks = find_blocks(
        "words\n" + fenced("python", "a", marker="fails") + "\n" + fenced("text", "b") + "c\n"
    )
    assert [(block.line, block.marker, block.follows) for block in blocks] == [
        (4, "fails", False),
        (8, "", True),
    ]
    with pytest.raises(ValueError, match="line 2 has no end"):
        find_blocks("```python\n1\n")


def test_knows_links_and_anchors():
    page = "# A `b.c`: d\n## A\n## A\n[x](y.md#z) `[no](link)` ![no](image.png)\n"
    assert links(page) == ["y.md#z"]
    assert anchors(page) == {"a-bc-d", "a", "a-1"}
