"""What commands end with, other than with success or an error in what they were told."""

from __future__ import annotations

from typing import IO, Any

import click

from energon.errors import ConfigError, EnergonError

GO_ON = frozenset({"index", "pack", "prepare", "prepare-media", "repair"})
"""Commands that take up what an interrupted run has left."""


class RefusedCommandError(click.ClickException):
    """What a command was asked for makes no sense, or is not there."""

    exit_code = 2


def failed_command(error: EnergonError) -> click.ClickException:
    """Return what ends a command with an error of ours."""
    reasons = (error, error.__cause__)
    refused = any(isinstance(each, (ConfigError, FileNotFoundError)) for each in reasons)
    return (RefusedCommandError if refused else click.ClickException)(str(error))


class NotCheckedError(click.ClickException):
    """Nothing can be said about the dataset: another exit code than that something is wrong."""

    exit_code = 2


class InterruptedCommandError(click.ClickException):
    """Somebody has pressed Ctrl-C.

    Args:
        command: The command that was running.
    """

    exit_code = 130
    """What shells take for SIGINT."""

    def __init__(self, command: str | None) -> None:
        super().__init__(
            "interrupted; what is done is kept, the same command goes on from there"
            if command in GO_ON
            else "interrupted; nothing that is incomplete was left"
        )

    def show(self, file: IO[Any] | None = None) -> None:
        """Say so; it is no error."""
        click.echo(f"\n{self.format_message()}", file=file, err=file is None)
