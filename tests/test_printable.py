from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import pytest

from energon import WorkerConfig, get_train_dataset
from energon.errors import DatasetNotFoundError, EnergonError, FormatError, NoSuchFileError
from energon.messages import Lines, escape_line, escape_text
from tests.source_modules import source_modules

EVIL = "a\x1b[31m\x9b\x07\u202eb\udcff\r"
SECRET, REDACTED = "https://me:p@ss 'w\"ord@host/x?sig='s", "https://***@host/x?***"
SAFE = "a\\x1b[31m\\x9b\\x07\\u202eb\\xff\\r"


def test_what_terminals_obey_is_escaped():
    assert escape_text(EVIL + "\n\tend") == SAFE + "\n\tend"
    assert escape_line(EVIL + "\n\tend") == SAFE + "\\n\\tend"
    assert escape_line("é 日本 \\n 😀") == "é 日本 \\n 😀"


def every_error(cls):
    return [cls, *(each for sub in cls.__subclasses__() for each in every_error(sub))]


@pytest.mark.parametrize("cls", every_error(EnergonError))
def test_messages_of_all_errors_are_escaped_and_redacted(cls):
    assert cls.__str__ in (EnergonError.__str__, NoSuchFileError.__str__)
    if cls.__module__ == EnergonError.__module__:
        assert str(cls(f"{EVIL}: {SECRET} what")) == f"{SAFE}: {REDACTED} what"
        assert "ss" not in repr(cls(SECRET)).removeprefix(cls.__name__)


def test_causes_that_are_formatted_into_messages_are_escaped():
    assert f"{FormatError(EVIL)}" == SAFE
    assert str(DatasetNotFoundError(EVIL)) == str(NoSuchFileError(EVIL)) == SAFE


def test_log_records_are_escaped_and_redacted(caplog):
    log = logging.getLogger("energon")
    log.warning("%s: %d %s", f"{EVIL}\nforged", 1, Path(EVIL))
    log.warning("first\nsecond %s", FormatError(EVIL))
    log.warning(EVIL)
    log.warning("%s: retried %s", SECRET, [SECRET])
    log.warning("was here: %s", Lines(f"first\nsecond {EVIL}"))
    assert caplog.messages == [
        f"{SAFE}\\nforged: 1 {SAFE}",
        f"first\nsecond {SAFE}",
        SAFE,
        f"{REDACTED}: retried ['{REDACTED}']",
        f"was here: first\nsecond {SAFE}",
    ]


def test_commands_print_through_echo_only():
    """Whatever else prints could let names from data steer the terminal."""
    modules = [each for each in source_modules() if each.path.startswith("energon/cli/")]
    assert any(each.prints for each in modules)
    safe = ("json.dumps(", "draw(pixels)")  # images hold no names
    for module in modules:
        if not module.path.endswith("/cli/main.py"):
            others = [each for each in module.prints if not any(name in each for name in safe)]
            assert others == [], module.path


def test_commands_in_messages_quote_what_a_shell_would_split(tmp_path):
    folder = tmp_path / "my photos #1"
    folder.mkdir()
    (folder / "a.tar").write_bytes(bytes(10240))

    with pytest.raises(FileNotFoundError) as raised:
        get_train_dataset(folder, worker_config=WorkerConfig.default_worker_config(), batch_size=1)

    command = str(raised.value).split("`")[1]
    assert shlex.split(command) == ["energon", "prepare", str(folder)]


def test_every_command_in_a_message_quotes_its_paths():
    commands = [
        command
        for module in source_modules()
        for text in module.formatted
        for command in re.findall(r"`energon [a-z][^`]*\{[^`]*", text)
    ]

    assert len(commands) > 20
    assert [each for each in commands if re.search(r"\{(?!shell_word|_target)", each)] == []
