"""`energon tar stat`."""

from __future__ import annotations

import json

import click

from energon.cli.command_group import echo
from energon.cli.tar_commands import options


@click.command("stat")
@options.inputs
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
@options.allow
@options.progress
def command(inputs: tuple[str, ...], as_json: bool, allow: tuple[str, ...], progress: bool) -> None:
    """Count what shards hold: samples, fields, bytes, and which fields samples have together.

    \b
    Example:
      energon tar stat 'train-*.tar'
      energon tar stat --json 's3://bucket/train-*.tar' | jq .samples
    """
    from energon.webdataset.tools.inspect import Statistics, count
    from energon.webdataset.tools.streams import expand_inputs

    urls = expand_inputs(inputs)
    found = Statistics()
    with options.progress_bar(progress, "counting", "shards") as advance:
        for found in count(urls, allow=allow):
            advance(found.shards, len(urls))
    about = found.to_json()
    if as_json:
        click.echo(json.dumps(about, indent=2))
        return
    echo(f"shards  {about['shards']}")
    echo(f"samples {about['samples']}")
    echo(f"bytes   {about['bytes']}")
    for name, each in about["fields"].items():
        echo(
            f"field {name}: {each['count']} of {each['smallest']} to {each['largest']} bytes, "
            f"{each['mean']:.0f} on average"
        )
    for layout in about["layouts"]:
        echo(f"{options.amount(layout['samples'], 'sample')} with {' '.join(layout['fields'])}")
