"""Options of several commands; those that cannot count are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from energon.allow import CAPABILITIES, VARIABLE, allowed_by_environment
from energon.errors import ConfigError


def parse_field_map(text: str | None) -> dict[str, str] | None:
    """Return what the option says; None if it is not given.

    Raises:
        ConfigError: If it is no JSON object.
    """
    if text is None:
        return None
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--field-map {text}: {error}; expected JSON") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f'--field-map {text}: expected {{"FIELD": "PART"}}')
    return mapping


F = TypeVar("F", bound=Callable[..., Any])


def allow_option(function: F, *, expose_value: bool = False) -> F:
    """Let a command take `--allow NAME`, which holds for all that it does, in its workers too.

    Args:
        function: The command.
        expose_value: Whether it gets the names as `allow`.
    """
    return click.option(
        "--allow",
        metavar="NAME",
        multiple=True,
        type=click.Choice(list(CAPABILITIES)),
        callback=_allow,
        expose_value=expose_value,
        help=f"Let data do what they may not do by themselves: {', '.join(CAPABILITIES)}. Repeat.",
    )(function)


def _allow(context: click.Context, _: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    before = os.environ.get(VARIABLE)

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    if names:
        os.environ[VARIABLE] = ",".join(sorted({*names, *allowed_by_environment()}))
        context.call_on_close(restore)
    return names


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


def is_given(context: click.Context, name: str) -> bool:
    """Return whether a parameter stands on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


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
        and is_given(context, str(each.name))
    ]
    if given:
        raise ConfigError(f"{what}, for which {', '.join(given)} cannot count; leave that out")
