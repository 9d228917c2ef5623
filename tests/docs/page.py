"""Run the examples of a page, from its first block to its last.

- `python` blocks of a page share one namespace, that of a program's main module.
- `console` blocks have a command in each line that begins with `$ `, carried on in the next
  line by a backslash. Each has to succeed. Lines below it are what it prints.
- A `text` block right below a `python` block is what that block prints.
- A `yaml` or `python` block that begins with a comment like `# data/blend.yaml` or
  `# train.py` is written to that file, and not run.

In what is printed, `…` stands for any text. Comments before a block say what else is expected:
`<!-- raises ConfigError -->` or `<!-- fails -->`, `<!-- serves -->` for `energon view`, whose pages
are asked for, `<!-- a process of its own -->` for a program that starts others or that torchrun
itself is to start, and rarely `<!-- not run: reason -->`, which blocks of other languages need,
too.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import types
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from energon.cli.main import main as energon
from tests.docs.markdown import Block, find_blocks
from tests.ranks import Forked, started

SECONDS = 600
SHOWN = ("", "text", "yaml", "json")
_FOR_A_SHELL = re.compile(r"[|<>&;$`*?]|\\(?!\n)")
_PROGRAM = re.compile(
    r"(?:python|torchrun (?:--standalone )?--nproc-per-node (?P<ranks>\d+)) "
    r"(?P<words>\S+\.py[^|]*?)(?: 2>&1 \| grep (?P<shown>\w+))?\s*"
)
_OURS = re.compile(r"((?:[A-Z][A-Z_]*=[\w./]+ )*)energon ")
_NAMED = re.compile(r"# ([\w./-]+\.(?:ya?ml|py))\n")


@dataclass
class Page:
    """A page that is being run in the working directory."""

    name: str
    module: types.ModuleType
    printed: str | None = None

    def run(self, block: Block) -> None:
        if block.marker.startswith("not run"):
            reason = block.marker.partition(":")[2].strip()
            assert len(reason.split()) > 2, f"{self.at(block)}: say why it is not run"
            self.printed = None
        elif block.language in ("python", "yaml") and (name := _NAMED.match(block.text)):
            Path(name[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(name[1]).write_text(block.text)
            self.printed = None
        elif block.language == "python":
            self.printed = self.execute(block)
        elif block.marker == "serves":
            self.printed = None
            for command, wanted in commands(block.text):
                self.check(block, serve(command), wanted)
        elif block.language == "console":
            self.printed = None
            for command, wanted in commands(block.text):
                if " examples/" in command:  # decimals depend on the machine
                    wanted = re.sub(r"\d+\.\d+", "…", wanted)
                self.check(block, call(command, block.marker), wanted)
        elif block.language == "text" and block.follows and self.printed is not None:
            self.check(block, self.printed, block.text)
            self.printed = None
        else:
            assert block.language in SHOWN, f"{self.at(block)}: {block.language} is not run"

    def execute(self, block: Block) -> str:
        """Run Python; tracebacks show the line of the page."""
        code = compile("\n" * (block.line - 1) + block.text, self.name, "exec")
        wanted = block.marker.removeprefix("raises ") if block.marker.startswith("raises") else ""
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                exec(code, self.module.__dict__)
            except Exception as error:
                kind = type(error).__name__
                if kind != wanted:
                    raise
                print(f"{kind}: {error}")
            else:
                assert not wanted, f"{self.at(block)}: raises no {wanted}"
        return output.getvalue()

    def check(self, block: Block, printed: str, wanted: str) -> None:
        if wanted.strip():
            assert matches(printed, wanted), (
                f"{self.at(block)} shows\n{wanted}\nbut this was printed:\n{printed}"
            )

    def at(self, block: Block) -> str:
        return f"{self.name}:{block.line}"


def run_page(name: str, text: str, main: types.ModuleType) -> None:
    page = Page(name, main)
    for block in find_blocks(text):
        page.run(block)


def commands(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with what it is shown to print."""
    found: list[tuple[str, str]] = []
    carried = False
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif not found:
            raise ValueError(f"{line!r} comes before any command")
        elif carried:
            found[-1] = (found[-1][0] + line, "")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
        carried = line.endswith("\\\n") and not found[-1][1]
    return found


def call(command: str, marker: str = "") -> str:
    """Return what a command prints; those of ours that need no shell run in this process.

    Programs are forked from a process that has imported torch and what else takes seconds.
    """
    program = None if marker == "a process of its own" else _PROGRAM.fullmatch(command)
    if program and command.startswith("python examples/"):
        code, printed = 0, _call_example(*shlex.split(program["words"].replace("\\\n", "")))
    elif program and not _FOR_A_SHELL.search(program["words"]):
        code, printed = _fork(program)
    elif (variables := _OURS.match(command)) and not _FOR_A_SHELL.search(command):
        words = shlex.split(command.replace("\\\n", "")[variables.end() :])
        environment = dict(each.split("=") for each in variables[1].split())
        runner = CliRunner(env={"COLUMNS": "100", **environment})
        done = runner.invoke(energon, words, prog_name="energon")
        if not isinstance(done.exception, SystemExit | None):
            raise done.exception
        code, printed = done.exit_code, done.output
    else:
        code, printed = _call_shell(command)
    assert (code != 0) == (marker == "fails"), f"{command} gave {code}:\n{printed}"
    return printed


def _fork(command: re.Match[str]) -> tuple[int, str]:
    program, *arguments = shlex.split(command["words"])
    if command["ranks"]:
        running = started(
            *arguments, ranks=int(command["ranks"]), program=Path(program).resolve(), merged=True
        )
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = [Forked([program, *arguments], environment, merged=True)]
    lines = "".join(each.communicate() for each in running).splitlines(keepends=True)
    code = max(abs(each.returncode or 0) for each in running)
    return code, "".join(each for each in lines if (command["shown"] or "") in each)


def _call_example(path: str, *arguments: str) -> str:
    """Return what a program prints that has a function `main`, run in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more cost more than they save beside other tests
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path)["main"](arguments)
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


def serve(command: str) -> str:
    """Return what `energon view` prints before it is interrupted; its pages have to be there."""
    words = [sys.executable, "-m", *shlex.split(command), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            printed = server.stdout.readline()
            for page in ("", "run", "s/0/0/0"):
                with urllib.request.urlopen(f"{printed.split()[0]}{page}") as answer:
                    assert b'class="problem"' not in answer.read()
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    return re.sub(r":\d+/", ":8710/", printed)


def _call_shell(command: str) -> tuple[int, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
    )
    return done.returncode, done.stdout


def matches(printed: str, wanted: str) -> bool:
    """Return whether `printed` is what is `wanted`, in which `…` stands for any text."""
    pattern = "(?s:.*?)".join(map(re.escape, _stripped(wanted).split("…")))
    return re.fullmatch(pattern, _stripped(printed)) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
