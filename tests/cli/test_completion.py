"""Shells complete commands, options and paths after the command that the docs have for them."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.process import find_program

ROOT = Path(__file__).parents[2]
TYPED = {
    "energon verif": "verify",
    "energon pack --num-wo": "--num-workers",
    "energon info sha": "shapes.tar",
}
"""What is typed before Tab, and what must be there afterwards."""
PROMPT = "ready-for-more> "


@pytest.fixture
def home(tmp_path):
    """A home without settings, but for what the docs expect."""
    (tmp_path / ".config/fish/completions").mkdir(parents=True)
    (tmp_path / ".bashrc").write_text(f"PS1='{PROMPT}'\nbind 'set enable-bracketed-paste off'\n")
    (tmp_path / ".zshrc").write_text(
        f"PS1='{PROMPT}'\nunsetopt zle_bracketed_paste prompt_sp 2> /dev/null\n"
        "autoload -Uz compinit && compinit -u\n"
    )
    (tmp_path / "shapes.tar").touch()
    return tmp_path


@pytest.fixture
def environment(home):
    """The variables of a shell in which `energon` is this one."""
    program = home / "bin/energon"
    program.parent.mkdir()
    code = "from energon.cli.main import main; main(prog_name='energon')"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "HOME": str(home), "PATH": path, "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def install(shell, environment):
    """Run the one command of the docs for a shell."""
    page = (ROOT / "docs/command_line.md").read_text()
    (command,) = re.findall(rf"^\$ (_ENERGON_COMPLETE={shell}_source .*)$", page, re.MULTILINE)
    subprocess.run([find_program(shell), "-c", command], env=environment, check=True)


@pytest.mark.slow  # each completion starts Python
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_commands_options_and_paths(shell, home, environment):
    install(shell, environment)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(home)
        os.execve(find_program(shell), [shell, "-i"], environment)
    try:
        wait_for(PROMPT, terminal)
        for typed, completed in TYPED.items():
            os.write(terminal, f"{typed}\t".encode())
            wait_for(f"{typed.rpartition(' ')[0]} {completed}", terminal)
            os.write(terminal, b"\x15")  # Ctrl-U deletes the line
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.slow
def test_fish_completes_commands_options_and_paths(home, environment):
    install("fish", environment)
    for typed, completed in TYPED.items():
        done = subprocess.run(
            [find_program("fish"), "--command", f"complete --do-complete '{typed}'"],
            env=environment,
            cwd=home,
            capture_output=True,
            text=True,
            check=True,
        )
        assert completed in [line.partition("\t")[0] for line in done.stdout.splitlines()]


def wait_for(text, terminal):
    """Read what a shell shows until it has shown `text`; the time limit of the test ends it."""
    shown = b""
    with contextlib.suppress(OSError):
        while text.encode() not in re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|[\x00-\x1f]", b"", shown):
            select.select([terminal], [], [])
            shown += os.read(terminal, 4096)
        return
    raise AssertionError(f"expected {text!r}, the shell ended after {shown!r}")
