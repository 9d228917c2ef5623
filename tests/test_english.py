"""Docstrings and messages have nouns of the field as their objects, not clauses.

`Return the settings of a run`, not `Return what a run has`; a person or a process, not `whoever`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = ["src/**/*.py", "plugins/*/src/**/*.py", "examples/**/*.py"]

CLAUSES = {
    "a clause after the verb": r"^(Returns?|Yields?) (what|that|those|whatever|whoever)\b",
    "a twin of another docstring": r"^(Do|Does) the same\b|^The same\b",
}
"""Beginnings of docstrings and of messages."""
PRONOUNS = {
    "no person or process": r"\b(nobody|whoever|somebody)\b",
    "a clause after the verb": r"\bsays which\b",
}
"""Words of docstrings, messages and comments."""


def texts(code: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages and comments of a program, with the numbers of their lines."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for number, line in enumerate(code.splitlines(), start=1):
        if comment := re.search(r"(?:^|\s)# (.*)", line):
            yield number, comment[1]


def problems(code: str) -> list[str]:
    """Return the sentences of a program that have the habit, each with its line."""
    return [
        f"{number}: {habit}: {text[:80]!r}"
        for number, text in texts(code)
        for habits in (CLAUSES, PRONOUNS)
        for habit, pattern in habits.items()
        if re.search(pattern, text, 0 if habits is CLAUSES else re.IGNORECASE)
    ]


@pytest.mark.parametrize("pattern", PROGRAMS)
def test_objects_of_docstrings_and_messages_are_nouns(pattern):
    listed = {
        str(path.relative_to(ROOT)): problems(path.read_text()) for path in ROOT.glob(pattern)
    }
    assert not {path: lines for path, lines in listed.items() if lines}


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
    assert len(problems(code)) == count
