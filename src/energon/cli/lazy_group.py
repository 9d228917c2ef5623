"""A group of commands that are imported when they run, so that help comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from energon.cli.verbosity import add_verbosity


class LazyGroup(click.Group):
    """Knows the names of its commands, and imports one only to run it or to show its help.

    Args:
        summaries: What each command does, in a sentence, by its name.
        prefix: What the names of their modules begin with; `command` is looked for in them.
        settings: Those of `click.Group`.
    """

    def __init__(self, *, summaries: Mapping[str, str], prefix: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._summaries = summaries
        self._prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            return None
        module = import_module(self._prefix + cmd_name.replace("-", "_"))
        command: click.Command = module.command
        return add_verbosity(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._summaries.items()))
