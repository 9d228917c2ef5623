"""Options shared by the commands for tar files, and their progress display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, TypeVar

import click

from energon.cli.command_group import echo

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

UPDATE_ITEMS = 512

COUNT = click.IntRange(min=0)
POSITIVE = click.IntRange(min=1)
SIZE = click.FloatRange(min=1)


def inputs(function: F) -> F:
    """Add the shards to read."""
    return click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")(function)


def allow(function: F) -> F:
    """Add what is allowed."""
    return click.option(
        "--allow",
        multiple=True,
        type=click.Choice(["shell", "pickle"]),
        help="Allow addresses that are shell commands (pipe:...), or pickles to be decoded.",
    )(function)


def output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add where samples are written, which the command receives as `target`."""

    @wraps(function)
    def run(**given: Any) -> Any:
        from energon.webdataset.tools.streams import Output

        limits = {name: given.pop(name) for name in ("maxcount", "maxsize", "index")}
        target = Output(given.pop("output"), allow=given["allow"], **limits)
        return function(target=target, **given)

    command: Callable[..., Any] = run
    for option in (
        click.option(
            "--index/--no-index", default=False, help="Write indexes next to local files."
        ),
        click.option("--maxsize", type=SIZE, help="Maximum size of an output shard in bytes."),
        click.option(
            "--maxcount", type=POSITIVE, help="Maximum number of samples in an output shard."
        ),
        click.option(
            "-o",
            "--output",
            required=True,
            metavar="OUTPUT",
            help="Path or address, - for standard output, or one with %06d for several.",
        ),
    ):
        command = option(command)
    return command


def progress(function: F) -> F:
    """Add whether to show progress."""
    return click.option(
        "--progress/--no-progress", default=True, help="Show a progress bar on terminals."
    )(function)


def reporting_progress(
    items: Iterable[T], advance: Callable[[int, int | None], None]
) -> Iterator[T]:
    """Yield items, reporting progress now and then."""
    number = 0
    for number, item in enumerate(items, 1):
        yield item
        if not number % UPDATE_ITEMS:
            advance(number, None)
    advance(number, None)


def report(text: str) -> None:
    """Write a line to standard error, where it does not mix with output."""
    echo(text, err=True)
