"""Run commands in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from energon.cli.main import main


def run(*arguments: object) -> Result:
    """Return what `energon ARGUMENTS` does."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])
