"""`energon tar sort`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from energon.cli.tar_commands import options

if TYPE_CHECKING:
    from energon.webdataset.tools.sort import SortKind


@click.command("sort")
@options.inputs
@click.option(
    "-k",
    "--by",
    default="__key__",
    show_default=True,
    metavar="FIELD",
    help="What to sort by: a field, __key__, or __random__ for a shuffle of everything.",
)
@click.option(
    "--as",
    "kind",
    default="text",
    show_default=True,
    type=click.Choice(["text", "int", "float"]),
    help="How values are compared.",
)
@click.option("--reverse", is_flag=True, help="The highest first.")
@click.option("--seed", default=0, show_default=True, help="What a random order depends on.")
@click.option("-f", "--fields", help="Fields to keep: words of NAME, or NEW:OLD,OTHER.")
@click.option("-R", "--rekey", metavar="KEY", help="New keys: %06d counts, {key} is the old one.")
@click.option("--slice", "sample_slice", metavar="A:B:C", help="Which samples to read.")
@click.option(
    "--memory",
    default=1e9,
    type=options.SIZE,
    show_default=True,
    help="Bytes to hold; the rest on disk.",
)
@click.option("--tmpdir", metavar="FOLDER", help="Where the rest waits.")
@options.output
@options.allow
@options.progress
def command(
    inputs: tuple[str, ...],
    by: str,
    kind: SortKind,
    reverse: bool,
    seed: int,
    fields: str | None,
    rekey: str | None,
    sample_slice: str | None,
    memory: float,
    tmpdir: str | None,
    output: str,
    maxcount: int | None,
    maxsize: float | None,
    index: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Sort the samples of shards, however many there are.

    Samples with equal values stay in the order in which they came; none is lost.

    \b
    Example:
      energon tar sort 'scattered-*.tar' -o sorted.tar
      energon tar sort in.tar --by cls --as int -o by-class-%06d.tar
      energon tar sort 'train-{000..127}.tar' --by __random__ -o shuffled-%06d.tar
    """
    from energon.webdataset.tools import sort, streams
    from energon.webdataset.tools.streams import Output, expand_inputs, read_samples, write_all

    samples = streams.sliced(
        read_samples(expand_inputs(inputs), allow=allow), streams.parse_slice(sample_slice)
    )
    chosen = streams.parse_fields(fields)
    if by == "__random__":
        value = sort.random_value(seed)
    else:
        value = sort.sort_value(by, kind)
    with options.progress_bar(progress, "sorting", "samples") as advance:
        ordered = sort.sorted_samples(
            options.counted(samples, advance),
            value,
            reverse=reverse,
            memory_bytes=int(memory),
            folder=tmpdir,
        )
        if chosen is not None:
            ordered = streams.with_fields(ordered, chosen)
        if rekey is not None:
            ordered = streams.with_keys(ordered, rekey)
        target = Output(output, maxcount, maxsize, index=index, allow=allow)
        count = write_all(ordered, target)
    options.report(options.amount(count, "sample"))
