"""`energon measure`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import click

from energon.arguments import load_named
from energon.cli.command_group import echo, echo_json, is_quiet
from energon.cli.options import (
    ADDRESS,
    ReadingOptions,
    allow_option,
    option,
    options_object,
)
from energon.io.epath import AnyPath
from energon.messages import counted


@dataclass(frozen=True)
class MeasureOptions:
    """The options of the command, see its help."""

    name: str = option(required=True, metavar="NAME", help="Name of the measure.")
    function: str = option(
        "--with",
        required=True,
        metavar="MODULE:FUNCTION",
        help="Function that takes a sample, a dict of its parts, and returns a number.",
    )
    decode: bool = option(
        is_flag=True, help="Decode the parts of samples; images become Pillow images."
    )
    again: bool = option(
        is_flag=True, help="Measure all samples again, for example after changing the function."
    )
    wait: bool = option(is_flag=True, help="Wait for another process that writes the dataset.")
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@click.command("measure")
@click.argument("path", type=ADDRESS)
@options_object(MeasureOptions)
@options_object(ReadingOptions, name="reading")
@partial(allow_option, expose_value=True)
def command(
    path: AnyPath, options: MeasureOptions, reading: ReadingOptions, allow: tuple[str, ...]
) -> None:
    """Store a number for each sample of the dataset or metadataset at PATH, such as its tokens.

    Worker processes call the function with each sample, and store the numbers beside the index,
    where Balance(cost=NAME) finds them. Reads only new and changed shards. Run the command again
    after an interruption to continue.

    \b
    Example:
      energon measure ./coco --name tokens --with my_measures:count_tokens
    """
    from energon.inspect.measure import measure_dataset

    function = load_named("--with", options.function)
    with reading.open("measuring samples") as how:
        reports = measure_dataset(
            path,
            function,
            name=options.name,
            function_name=options.function,
            decode=options.decode,
            again=options.again,
            engine=how.engine,
            wait=options.wait,
            allow=allow,
            progress=how.progress,
        )
    if options.as_json:
        echo_json({"name": options.name, "datasets": [each._asdict() for each in reports]})
    elif not is_quiet():
        for each in reports:
            samples = counted(each.num_samples, "sample")
            echo(f"{each.path}: {samples}, {each.measured} of them measured now")
