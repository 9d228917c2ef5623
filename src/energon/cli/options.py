"""Give a command what its options say as one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

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
