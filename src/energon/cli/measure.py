"""`energon measure`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from energon.arguments import load_named
from energon.cli.main import echo, echo_json, is_quiet
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

    name: str | None = option(metavar="NAME", help="Name of the measure.")
    function: str | None = option(
        "--with",
        metavar="MODULE:FUNCTION",
        help="Function that takes a sample, a dict of its parts, and returns a number.",
    )
    text: bool = option(
        is_flag=True,
        help="Index the texts of samples instead, for text searches in `energon view`.",
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
@allow_option
def command(path: AnyPath, options: MeasureOptions, reading: ReadingOptions) -> None:
    """Store a number for each sample of the dataset or metadataset at PATH, such as its tokens.

    Worker processes call the function with each sample, and store the numbers beside the index,
    where Balance(cost=NAME) finds them. Reads only new and changed shards. Run the command again
    after an interruption to continue.

    With --text, indexes the texts of samples in the same way, so that text searches in `energon
    view` read only samples that may match.

    \b
    Example:
      energon measure ./coco --name tokens --with my_measures:count_tokens
      energon measure ./coco --text
    """
    from energon.inspect.measure import measure_dataset
    from energon.inspect.text_index import index_texts

    name, called = options.name, options.function
    measure: Callable[..., Any]
    if options.text:
        if name or called or options.decode:
            raise click.UsageError("--text takes neither --name and --with nor --decode")
        name, doing, measure = "texts", "indexing texts", index_texts
    elif name is None or called is None:
        raise click.UsageError("pass --name and --with, or --text")
    else:
        doing = "measuring samples"
        measure = partial(
            measure_dataset,
            function=load_named("--with", called),
            name=name,
            function_name=called,
            decode=options.decode,
        )
    with reading.open(doing) as how:
        reports = measure(
            path, again=options.again, engine=how.engine, wait=options.wait, progress=how.progress
        )
    if options.as_json:
        echo_json({"name": name, "datasets": [each._asdict() for each in reports]})
    elif not is_quiet():
        for each in reports:
            samples = counted(each.num_samples, "sample")
            done = "indexed" if options.text else "measured"
            echo(f"{each.path}: {samples}, {each.measured} of them {done} now")
