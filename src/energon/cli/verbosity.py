"""What commands print, and the options `--quiet` and `--verbose`, which every command has."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from energon.messages import escape_line


def echo(line: str, *, err: bool = False) -> None:
    """Print one line; what would begin another one or steer the terminal is escaped."""
    click.echo(escape_line(line), err=err)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines, each as `echo` does."""
    for line in lines:
        echo(line, err=err)


def echo_json(about: Any) -> None:
    """Print plain data as JSON, whose escapes make names safe."""
    click.echo(json.dumps(about, indent=2))


_KEY = "energon.verbosity"


def add_verbosity(command: click.Command) -> click.Command:
    """Add the options to a command, or to those of a group, unless it has them."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_verbosity(each)
        return command
    if any(each.name == "quiet" for each in command.params):
        return command
    short = {option for each in command.params for option in each.opts}
    command.params += [
        click.Option(
            [*(["-q"] if "-q" not in short else []), "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_be_quiet,
            help="Say nothing but results, warnings and errors.",
        ),
        click.Option(
            [*(["-v"] if "-v" not in short else []), "--verbose"],
            is_flag=True,
            expose_value=False,
            callback=_be_verbose,
            help="Show all that is logged.",
        ),
    ]
    return command


def is_quiet() -> bool:
    """Return whether the running command was told to be quiet."""
    return _level() == "quiet"


def is_verbose() -> bool:
    """Return whether the running command shows all that is logged."""
    return _level() == "verbose"


def _level() -> str | None:
    context = click.get_current_context(silent=True)
    return None if context is None else str(context.meta.get(_KEY))


def _be_quiet(context: click.Context, option: Any, value: bool) -> None:
    if value:
        context.meta[_KEY] = "quiet"


def _be_verbose(context: click.Context, option: Any, value: bool) -> None:
    if value:
        if context.meta.get(_KEY) == "quiet":
            raise click.UsageError("choose one of --quiet and --verbose")
        context.meta[_KEY] = "verbose"
        context.with_resource(_showing_all())


@contextmanager
def _showing_all() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("energon")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
