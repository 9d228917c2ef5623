"""`--allow`: what data may do while a command runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from energon.allow import CAPABILITIES, VARIABLE, allowed_by_environment

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
