"""Commands of `energon tar` that write shards from shards: `cat`, `split`, `sort`."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import click

from energon.cli.tar_commands import options

if TYPE_CHECKING:
    from energon.webdataset.tools.sort import SortKind


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
@click.option("--seed", default=0, show_default=True, help="Seed for random orders.")
@click.option(
    "-m",
    "--mix",
    default=1,
    type=options.POSITIVE,
    metavar="N",
    help="Take samples of N shards in turn.",
)
@click.option("--slice", "sample_slice", metavar="A:B:C", help="Samples of the result to keep.")
@click.option("--shard-slice", metavar="A:B:C", help="Samples of each shard to keep.")
@click.option(
    "--max-errors",
    default=0,
    type=options.COUNT,
    metavar="N",
    help="Continue after up to N damaged shards.",
)
@options.output
@options.allow
@options.progress
def cat_command(
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
    """Join the samples of shards; select, shuffle and rename them on the way.

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


@click.command("split")
@options.inputs
@click.option(
    "-c",
    "--count",
    default=1_000_000,
    type=options.POSITIVE,
    show_default=True,
    help="Maximum number of samples in a shard.",
)
@click.option(
    "-s",
    "--size",
    default=1e9,
    type=options.SIZE,
    show_default=True,
    help="Maximum size of a shard in bytes.",
)
@click.option(
    "-o",
    "--output",
    default="split-%06d.tar",
    show_default=True,
    metavar="OUTPUT",
    help="Names of shards.",
)
@click.option(
    "--start", default=0, type=options.COUNT, show_default=True, help="Number of the first shard."
)
@click.option("--slice", "sample_slice", metavar="A:B:C", help="Which samples.")
@click.option(
    "-p",
    "--post",
    metavar="COMMAND",
    help="Run for each complete shard, with its name for %s (or {}).",
)
@click.option("--delete", is_flag=True, help="Delete each shard after the command.")
@click.option("--index/--no-index", default=False, help="Write indexes beside local shards.")
@options.allow
@options.progress
def split_command(
    inputs: tuple[str, ...],
    count: int,
    size: float,
    output: str,
    start: int,
    sample_slice: str | None,
    post: str | None,
    delete: bool,
    index: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Split shards into shards of at most a number of samples and of bytes.

    Samples are never cut. A sample larger than the limit is alone in a shard.

    \b
    Example:
      energon tar split huge.tar --size 1e9 -o part-%06d.tar
      energon tar split huge.tar -o part-%06d.tar --post 'gsutil cp {} gs://bucket/' --delete
    """
    from energon.webdataset.tools import streams
    from energon.webdataset.tools.streams import Output, expand_inputs, read_samples, write_all

    urls = expand_inputs(inputs)
    samples = streams.sliced(read_samples(urls, allow=allow), streams.parse_slice(sample_slice))
    target = Output(output, count, size, start=start, index=index, allow=allow)
    made: list[str] = []

    def complete(name: str) -> None:
        made.append(name)
        _run_post(post, name, delete)

    with options.progress_bar(progress, "splitting", "samples") as advance:
        written = write_all(options.counted(samples, advance), target, complete)
    options.report(f"{options.amount(written, 'sample')} in {options.amount(len(made), 'shard')}")


def _run_post(post: str | None, name: str, delete: bool) -> None:
    import os
    import shlex
    import subprocess

    from energon.errors import ConfigError

    if post is not None:
        quoted = shlex.quote(name)
        done = subprocess.run(post.replace("%s", quoted).replace("{}", quoted), shell=True)
        if done.returncode:
            raise ConfigError(f"{post!r} ended with status {done.returncode} for {name}")
    if delete:
        os.unlink(name)


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
    help="How to compare values.",
)
@click.option("--reverse", is_flag=True, help="Sort in descending order.")
@click.option("--seed", default=0, show_default=True, help="Seed for a random order.")
@click.option("-f", "--fields", help="Fields to keep: words of NAME, or NEW:OLD,OTHER.")
@click.option("-R", "--rekey", metavar="KEY", help="New keys: %06d counts, {key} is the old one.")
@click.option("--slice", "sample_slice", metavar="A:B:C", help="Samples to read.")
@click.option(
    "--memory",
    default=1e9,
    type=options.SIZE,
    show_default=True,
    help="Bytes to keep in memory; the rest goes to disk.",
)
@click.option("--tmpdir", metavar="FOLDER", help="Folder for temporary files.")
@options.output
@options.allow
@options.progress
def sort_command(
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

    Samples with equal values keep their order; none is lost.

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
