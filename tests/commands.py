"""Run commands in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from energon.cli.main import main


def run(*arguments: object) -> Result:
    """Return what `energon ARGUMENTS` does."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ok(*arguments: object) -> Result:
    """Return what `energon ARGUMENTS` does, which has to succeed."""
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return done
