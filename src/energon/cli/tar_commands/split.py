"""`energon tar split`."""

from __future__ import annotations

import click

from energon.cli.tar_commands import options


@click.command("split")
@options.inputs
@click.option(
    "-c",
    "--count",
    default=1_000_000,
    type=options.POSITIVE,
    show_default=True,
    help="Most samples of a shard.",
)
@click.option(
    "-s",
    "--size",
    default=1e9,
    type=options.SIZE,
    show_default=True,
    help="Most bytes of a shard.",
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
    help="Run for each shard that is complete, with its name for %s (or {}).",
)
@click.option("--delete", is_flag=True, help="Delete each shard after the command.")
@click.option("--index/--no-index", default=False, help="Write indexes beside local shards.")
@options.allow
@options.progress
def command(
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
    """Cut shards into shards of at most a number of samples and of bytes.

    A sample is never cut. Only one that is larger than the limit is in a larger shard, alone.

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
