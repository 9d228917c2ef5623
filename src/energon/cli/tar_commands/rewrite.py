"""Commands of `energon tar` that write shards from shards: `cat`, `split`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import click

from energon.cli import tar
from energon.cli.options import option, options_object, progress_bar
from energon.io.address import redact
from energon.messages import counted

if TYPE_CHECKING:
    from energon.webdataset.tools import Output


@dataclass(frozen=True)
class CatOptions:
    """The options of the command, see its help."""

    fields: str | None = option(
        "-f",
        "--fields",
        help="Fields to keep, separated by spaces: NAME, or NEW:OLD,OTHER to rename the first that "
        "exists.",
    )
    rekey: str | None = option(
        "-R", "--rekey", metavar="KEY", help="New keys: %06d counts, {key} is the old one."
    )
    shuffle: int = option(
        "-s",
        "--shuffle",
        default=0,
        type=tar.COUNT,
        metavar="N",
        help="Shuffle through a buffer of N.",
    )
    shuffle_shards: bool = option(is_flag=True, help="Read the shards in random order.")
    seed: int = option(default=0, show_default=True, help="Seed for random orders.")
    mix: int = option(
        "-m",
        "--mix",
        default=1,
        type=tar.POSITIVE,
        metavar="N",
        help="Take samples of N shards in turn.",
    )
    sample_slice: str | None = option(
        "--slice", metavar="A:B:C", help="Samples of the result to keep."
    )
    shard_slice: str | None = option(metavar="A:B:C", help="Samples of each shard to keep.")
    max_errors: int = option(
        default=0, type=tar.COUNT, metavar="N", help="Continue after up to N damaged shards."
    )


@click.command("cat")
@tar.inputs
@options_object(CatOptions, name="how")
@tar.output
@tar.json_option
@tar.allow
@tar.progress
def cat_command(
    inputs: tuple[str, ...],
    how: CatOptions,
    target: Output,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Join shards, and select, shuffle or rename their samples.

    Steps run in this order: --shard-slice, --mix, --slice, --fields, --shuffle, --rekey.

    \b
    Example:
      energon tar cat a.tar b.tar -o joined.tar
      energon tar cat 'train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar --maxcount 5000
      energon tar cat big.tar --slice 0:100 --fields 'image:png,jpg cls' -o - | tar t
    """
    from energon.webdataset import tools
    from energon.webdataset.tools import (
        SkipDamaged,
        expand_inputs,
        read_samples,
        write_all,
    )

    urls = expand_inputs(inputs)
    if how.shuffle_shards:
        urls = tools.shuffled_list(urls, how.seed)
    part, whole = tools.parse_slice(how.shard_slice), tools.parse_slice(how.sample_slice)
    chosen = tools.parse_fields(how.fields)
    handler = SkipDamaged(how.max_errors)
    shards = [tools.sliced(read_samples([url], allow=allow, handler=handler), part) for url in urls]
    samples = tools.interleaved(shards, how.mix) if how.mix > 1 else chain.from_iterable(shards)
    samples = tools.sliced(samples, whole)
    if chosen is not None:
        samples = tools.with_fields(samples, chosen)
    samples = tools.shuffled(samples, how.shuffle, how.seed)
    if how.rekey is not None:
        samples = tools.with_keys(samples, how.rekey)
    with progress_bar(progress, "joining", "samples") as advance:
        count = write_all(tar.reporting_progress(samples, advance), target)
    damaged = f", {counted(handler.count, 'damaged shard')}" if handler.count else ""
    total = counted(len(urls), "shard")
    text = f"{counted(count, 'sample')} of {total}{damaged}"
    result = {"samples": count, "shards": len(urls), "damaged": handler.count}
    tar.report(text, result, as_json=as_json, output=target.target)


@dataclass(frozen=True)
class SplitOptions:
    """The options of the command, see its help."""

    count: int = option(
        "-c",
        "--count",
        default=1_000_000,
        type=tar.POSITIVE,
        show_default=True,
        help="Maximum number of samples in a shard.",
    )
    size: float = option(
        "-s",
        "--size",
        default=1e9,
        type=tar.SIZE,
        show_default=True,
        help="Maximum size of a shard in bytes.",
    )
    output: str = option(
        "-o",
        "--output",
        default="split-%06d.tar",
        show_default=True,
        metavar="OUTPUT",
        help="Names of shards.",
    )
    start: int = option(
        default=0, type=tar.COUNT, show_default=True, help="Number of the first shard."
    )
    sample_slice: str | None = option("--slice", metavar="A:B:C", help="Samples to keep.")
    post: str | None = option(
        "-p",
        "--post",
        metavar="COMMAND",
        help="Command to run for each complete shard; {} or %s stands for its name.",
    )
    delete: bool = option(is_flag=True, help="Delete each shard after the command has run.")
    index: bool = option(
        "--index/--no-index", default=False, help="Write indexes next to local shards."
    )


@click.command("split")
@tar.inputs
@options_object(SplitOptions, name="how")
@tar.json_option
@tar.allow
@tar.progress
def split_command(
    inputs: tuple[str, ...],
    how: SplitOptions,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Split shards into shards of at most a number of samples and of bytes.

    Samples are never divided; one that is larger than the limit gets a shard of its own.

    \b
    Example:
      energon tar split huge.tar --size 1e9 -o part-%06d.tar
      energon tar split huge.tar -o part-%06d.tar --post 'gsutil cp {} gs://bucket/' --delete
    """
    from energon.webdataset import tools
    from energon.webdataset.tools import Output, expand_inputs, read_samples, write_all

    urls = expand_inputs(inputs)
    samples = tools.sliced(read_samples(urls, allow=allow), tools.parse_slice(how.sample_slice))
    target = Output(how.output, how.count, how.size, start=how.start, index=how.index, allow=allow)
    made: list[str] = []

    def complete(name: str) -> None:
        made.append(name)
        _run_post(how.post, name, how.delete)

    with progress_bar(progress, "splitting", "samples") as advance:
        written = write_all(tar.reporting_progress(samples, advance), target, complete)
    text = f"{counted(written, 'sample')} in {counted(len(made), 'shard')}"
    tar.report(text, {"samples": written, "shards": list(map(redact, made))}, as_json=as_json)


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
