"""Give a command what its options say as one object, and refuse those that cannot count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

import click
from click.core import ParameterSource

from energon.errors import ConfigError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options_object(kind: type[Any], options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, which gets what they say as `options`.

    Args:
        kind: A dataclass with a field for each option, called like its parameter.
        options: What `click.option` returns, in the order of the help.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*context: Any, **given: Any) -> Any:
            chosen = {each.name: given.pop(each.name) for each in fields(kind)}
            return command(*context, options=kind(**chosen), **given)

        decorated: Callable[..., Any] = run
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return add


def refuse_options(context: click.Context, what: str, honoured: Collection[str]) -> None:
    """Refuse the options of a command that do not count for what it is given.

    Args:
        context: The running command.
        what: What it is given, for the message: "x.jsonl is a JSONL file".
        honoured: Names of the parameters that count, or change nothing by their nature.

    Raises:
        ConfigError: If others were given.
    """
    given = [
        each.opts[0]
        for each in context.command.params
        if isinstance(each, click.Option)
        and each.expose_value
        and each.name not in honoured
        and context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise ConfigError(f"{what}, for which {', '.join(given)} cannot count; leave that out")
