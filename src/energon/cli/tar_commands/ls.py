"""`energon tar ls`."""

from __future__ import annotations

import json
from itertools import islice

import click

from energon.cli.command_group import echo
from energon.cli.tar_commands import options


@click.command("ls")
@options.inputs
@click.option("-n", "--number", type=options.COUNT, help="How many samples at most.")
@click.option("--members", is_flag=True, help="One file to a line, those of no sample, too.")
@click.option("--json", "as_json", is_flag=True, help="One sample to a line, as JSON.")
@options.allow
def command(
    inputs: tuple[str, ...],
    number: int | None,
    members: bool,
    as_json: bool,
    allow: tuple[str, ...],
) -> None:
    """List the samples of shards: their keys, and the fields with their sizes.

    \b
    Example:
      energon tar ls train-000000.tar | head
      energon tar ls --json 's3://bucket/train-*.tar' | jq -r .key
    """
    from energon.webdataset import security
    from energon.webdataset.tools.inspect import iter_members
    from energon.webdataset.tools.streams import expand_inputs, read_samples

    urls = expand_inputs(inputs)
    if members:
        listed = (
            member
            for url in urls
            for member in iter_members(url, security.resolve(allow), sizes=True)
        )
        for name, size in islice(listed, number):
            echo(f"{size:>12} {name}")
        return
    for sample in islice(read_samples(urls, allow=allow, sizes=True), number):
        sizes = {name: size for name, size in sample.items() if not name.startswith("__")}
        if as_json:
            about = {"key": sample["__key__"], "shard": sample["__url__"], "fields": sizes}
            click.echo(json.dumps(about))
        else:
            fields = " ".join(f"{name}:{size}" for name, size in sizes.items())
            echo(f"{sample['__key__']} {fields}")
