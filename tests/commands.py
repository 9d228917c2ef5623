"""Run commands in this process, and programs in others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from click.testing import CliRunner, Result

from energon.cli.main import main

ROOT = Path(__file__).parents[1]


def run(*arguments: object) -> Result:
    """Return what `energon ARGUMENTS` does."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ok(*arguments: object) -> Result:
    """Return what `energon ARGUMENTS` does, which has to succeed."""
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done


def run_python(
    program: str, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Return what a program does that has to succeed, with these variables in its environment."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done
