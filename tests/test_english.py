"""Docstrings, messages and pages have nouns of the field as their objects, not clauses.

`Return the settings of a run`, not `Return what a run has`; a person or a process, not `whoever`;
packages and layers, not rooms and floors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from tests.docs.markdown import prose
from tests.source_modules import ROOT, SourceModule, modules_in, source_modules

PAGES = ["*.md", "docs/*.md", "plugins/*/*.md"]

CLAUSES = {
    "a clause after the verb": r"^(Returns?|Yields?) (what|that|those|whatever|whoever)\b",
    "a twin of another docstring": r"^(Do|Does) the same\b|^The same\b",
}
"""Beginnings of docstrings and of messages."""
PRONOUNS = {
    "no person or process": r"\b(nobody|whoever|somebody)\b",
    "a clause after the verb": r"\bsays (which|what|how|whether)\b",
    "a word of buildings": r"\b(sub-)?rooms\b|\bfloors\b",
    "a circumlocution": (
        r"\bload of the machine\b|\btook turns\b|\bfor lack of\b|\bto be had\b|"
        r"\b(has|have) all that\b|\bheard as one\b"
    ),
}
"""Words of docstrings, messages, comments and pages."""
SUBJECTS = {"a clause as the subject": r"^(- )?What [^?:]*\.|\. What [^?:]*\."}
"""Sentences of pages, which are not questions."""


def texts(module: SourceModule) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments of a program, with the numbers of their lines."""
    yield from module.strings
    for number, line in enumerate(module.text.splitlines(), start=1):
        if "# " in line and (comment := re.search(r"(?:^|\s)# (.*)", line)):
            yield number, comment[1]


def problems(module: SourceModule) -> list[str]:
    """Return the sentences of a program that have the habit, each with its line."""
    return matching(texts(module), CLAUSES, PRONOUNS)


def problems_of_page(text: str) -> list[str]:
    """Return the lines of a page that have the habit; headings and code may be of any form."""
    lines = enumerate(prose(text).splitlines(), start=1)
    sentences = ((number, line) for number, line in lines if not line.startswith("#"))
    return matching(sentences, SUBJECTS, PRONOUNS)


def matching(sentences: Iterable[tuple[int, str]], *groups: dict[str, str]) -> list[str]:
    return [
        f"{number}: {habit}: {text[match.start() :][:80]!r}"
        for number, text in sentences
        for habits in groups
        for habit, pattern in habits.items()
        if (match := re.search(pattern, text, re.IGNORECASE if habits is PRONOUNS else 0))
    ]


def test_objects_of_docstrings_and_messages_are_nouns():
    others = modules_in(ROOT / "plugins/energon-mds/src") + modules_in(ROOT / "examples")
    listed = {each.path: problems(each) for each in [*source_modules(), *others]}
    assert not {path: lines for path, lines in listed.items() if lines}


@pytest.mark.parametrize("pattern", PAGES)
def test_pages_have_nouns_as_subjects_and_objects(pattern):
    listed = {
        str(path.relative_to(ROOT)): problems_of_page(path.read_text())
        for path in ROOT.glob(pattern)
    }
    assert listed
    assert not {path: lines for path, lines in listed.items() if lines}


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("What a hook decodes counts as its time.\n", 1),
        ("Read on. What differs is in a table.\n", 1),
        ("**What if a worker hangs?** It is replaced.\n", 0),
        ("# What differs\n", 0),
        ("The log says how a worker died.\n", 1),
        ("The load of the machine was at most 1.9.\n", 1),
        ("`rooms` are full\n", 0),
        ("Rooms import down the floors\n", 1),
    ],
)
def test_habits_of_pages_are_detected(page, count):
    assert bool(problems_of_page(page)) == bool(count)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('def f():\n    """Return what a run has."""', 1),
        ('def f():\n    """Return the settings of a run."""', 0),
        ('raise ValueError("nobody has closed the file")', 1),
        ("x = 1  # whoever reads it", 1),
        ('say("the log says which worker died")', 1),
        ('name = "nobody"', 0),
    ],
)
def test_clauses_and_pronouns_are_found(code, count):
    assert len(problems(SourceModule("m.py", code))) == count
