"""`energon tar`: commands for plain tar files, and the options that they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar

import click

from energon.cli.command_group import LazyGroup, echo, write_output

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

TAR_COMMANDS = {
    "cat": "Join shards, and select, shuffle or rename their samples.",
    "create": "Create a tar file from a recipe or a folder.",
    "index": "Write an index next to each shard.",
    "ls": "List the samples of shards.",
    "proc": "Transform every sample with a command or a function.",
    "split": "Split shards by number of samples or bytes.",
}


@click.group(
    "tar",
    cls=LazyGroup,
    summaries=TAR_COMMANDS,
    homes={name: f"energon.cli.tar_commands:{name}_command" for name in TAR_COMMANDS},
)
def command() -> None:
    """Work with plain tar files of samples, local or in object stores.

    Inputs are paths, addresses, patterns with {000..127} or *, folders, @LIST for a file with one
    of these per line, and - for standard input. Outputs are paths, addresses, and - for standard
    output; x-%06d.tar is split into as many shards as needed.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar cat 's3://bucket/train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar
      energon tar ls mixed-000000.tar
    """


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
        help="Allow shell commands as addresses (pipe:...), or pickles to be decoded.",
    )(function)


def output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add where samples are written, which the command receives as `target`."""

    @wraps(function)
    def run(**given: Any) -> Any:
        from energon.webdataset.tools import Output

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
            help="Path or address, with %06d for several; - for standard output.",
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


def json_option(function: F) -> F:
    """Add whether to print the result as JSON."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(
        function
    )


def report(text: str, about: Mapping[str, Any], *, as_json: bool, output: str = "") -> None:
    """Print a result, in words on standard error, where it does not mix with output, or as JSON.

    Args:
        text: The result in words.
        about: The result as plain data.
        as_json: Whether to print JSON.
        output: Where the command has written; JSON then goes to standard error as well if that is
            standard output.
    """
    if as_json:
        write_output(json.dumps(about, indent=2), err=output == "-")
    else:
        echo(text, err=True)
