from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from energon.errors import DatasetNotFoundError, EnergonError, FormatError, NoSuchFileError
from energon.messages import Lines, escape_line, escape_text

EVIL = "a\x1b[31m\x9b\x07\u202eb\udcff\r"
SAFE = "a\\x1b[31m\\x9b\\x07\\u202eb\\xff\\r"
CLI = Path(__file__).parents[1] / "src/energon/cli"


def test_what_terminals_obey_is_escaped():
    assert escape_text(EVIL + "\n\tend") == SAFE + "\n\tend"
    assert escape_line(EVIL + "\n\tend") == SAFE + "\\n\\tend"
    assert escape_line("é 日本 \\n 😀") == "é 日本 \\n 😀"


def every_error(cls):
    return [cls, *(each for sub in cls.__subclasses__() for each in every_error(sub))]


@pytest.mark.parametrize("cls", every_error(EnergonError))
def test_messages_of_all_errors_are_escaped(cls):
    assert cls.__str__ in (EnergonError.__str__, NoSuchFileError.__str__)
    if cls.__module__ == EnergonError.__module__:
        assert str(cls(f"{EVIL}: what")) == f"{SAFE}: what"


def test_causes_that_are_formatted_into_messages_are_escaped():
    assert f"{FormatError(EVIL)}" == SAFE
    assert str(DatasetNotFoundError(EVIL)) == str(NoSuchFileError(EVIL)) == SAFE


def test_log_records_are_escaped(caplog):
    log = logging.getLogger("energon")
    log.warning("%s: %d %s", f"{EVIL}\nforged", 1, Path(EVIL))
    log.warning("first\nsecond %s", FormatError(EVIL))
    log.warning(EVIL)
    log.warning("was here: %s", Lines(f"first\nsecond {EVIL}"))
    assert caplog.messages == [
        f"{SAFE}\\nforged: 1 {SAFE}",
        f"first\nsecond {SAFE}",
        SAFE,
        f"was here: first\nsecond {SAFE}",
    ]


def test_commands_print_through_echo_only():
    """Whatever else prints could let names from data steer the terminal."""
    found = []
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                text = ast.unparse(node)
                if ast.unparse(node.func) in ("click.echo", "click.secho", "print"):
                    found.append((path.name, text))
    allowed = {"command_group.py"}
    safe = ("json.dumps(", "draw(pixels)")  # pictures hold no names
    others = [text for name, text in found if name not in allowed]
    assert [text for text in others if not any(each in text for each in safe)] == []
    assert found
