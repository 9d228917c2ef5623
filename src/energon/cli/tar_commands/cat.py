"""`energon tar cat`."""

from __future__ import annotations

from itertools import chain

import click

from energon.cli.tar_commands import options


@click.command("cat")
@options.inputs
@click.option("-f", "--fields", help="Fields to keep: words of NAME, or NEW:OLD,OTHER.")
@click.option("-R", "--rekey", metavar="KEY", help="New keys: %06d counts, {key} is the old one.")
@click.option(
    "-s",
    "--shuffle",
    default=0,
    type=options.COUNT,
    metavar="N",
    help="Shuffle through a buffer of N.",
)
@click.option("--shuffle-shards", is_flag=True, help="Read the shards in random order.")
@click.option("--seed", default=0, show_default=True, help="What random orders depend on.")
@click.option(
    "-m",
    "--mix",
    default=1,
    type=options.POSITIVE,
    metavar="N",
    help="Take samples of N shards in turn.",
)
@click.option("--slice", "sample_slice", metavar="A:B:C", help="Which samples of the result.")
@click.option("--shard-slice", metavar="A:B:C", help="Which samples of each shard.")
@click.option(
    "--max-errors",
    default=0,
    type=options.COUNT,
    metavar="N",
    help="Go on after up to N damaged shards.",
)
@options.output
@options.allow
@options.progress
def command(
    inputs: tuple[str, ...],
    fields: str | None,
    rekey: str | None,
    shuffle: int,
    shuffle_shards: bool,
    seed: int,
    mix: int,
    sample_slice: str | None,
    shard_slice: str | None,
    max_errors: int,
    output: str,
    maxcount: int | None,
    maxsize: float | None,
    index: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Join the samples of shards, and choose, shuffle, rename on the way.

    The order of steps: slices of shards, mixing, the slice of all, fields, shuffling, keys.

    \b
    Example:
      energon tar cat a.tar b.tar -o joined.tar
      energon tar cat 'train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar --maxcount 5000
      energon tar cat big.tar --slice 0:100 --fields 'image:png,jpg cls' -o - | tar t
    """
    from energon.webdataset.tools import streams
    from energon.webdataset.tools.streams import (
        Output,
        SkipDamaged,
        expand_inputs,
        read_samples,
        write_all,
    )

    urls = expand_inputs(inputs)
    if shuffle_shards:
        urls = streams.shuffled_list(urls, seed)
    part, whole = streams.parse_slice(shard_slice), streams.parse_slice(sample_slice)
    chosen = streams.parse_fields(fields)
    handler = SkipDamaged(max_errors)
    shards = [
        streams.sliced(read_samples([url], allow=allow, handler=handler), part) for url in urls
    ]
    samples = streams.interleaved(shards, mix) if mix > 1 else chain.from_iterable(shards)
    samples = streams.sliced(samples, whole)
    if chosen is not None:
        samples = streams.with_fields(samples, chosen)
    samples = streams.shuffled(samples, shuffle, seed)
    if rekey is not None:
        samples = streams.with_keys(samples, rekey)
    target = Output(output, maxcount, maxsize, index=index, allow=allow)
    with options.progress_bar(progress, "joining", "samples") as advance:
        count = write_all(options.counted(samples, advance), target)
    damaged = f", {options.amount(handler.count, 'damaged shard')}" if handler.count else ""
    total = options.amount(len(urls), "shard")
    options.report(f"{options.amount(count, 'sample')} of {total}{damaged}")
