"""`energon tar verify`."""

from __future__ import annotations

import json
import sys

import click

from energon.cli.command_group import echo
from energon.cli.tar_commands import options


@click.command("verify")
@options.inputs
@click.option("--decode", is_flag=True, help="Decode images, arrays, JSON, ... to see if they do.")
@click.option("--json", "as_json", is_flag=True, help="Print what is found as JSON.")
@options.allow
@options.progress
def command(
    inputs: tuple[str, ...],
    decode: bool,
    as_json: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Read shards to their ends, and tell what is wrong with them.

    Finds what is cut off or damaged, samples whose files are scattered, keys that are there
    twice, names that readers cannot or should not use. The exit code is 1 if there is anything,
    and 2 if there are no such shards.

    \b
    Example:
      energon tar verify 'train-*.tar'
      energon tar verify --decode --json 's3://bucket/train-{000..127}.tar' | jq .problems
    """
    from energon.webdataset.tools.inspect import Verifier
    from energon.webdataset.tools.streams import expand_inputs

    urls = expand_inputs(inputs)
    verifier = Verifier(decode=decode, allow=allow)
    problems: list[str] = []
    with options.progress_bar(progress, "verifying", "shards") as advance:
        for number, url in enumerate(urls, 1):
            found = verifier.check(url)
            problems += found
            if not as_json:
                for problem in found:
                    echo(problem)
            advance(number, len(urls))
    if as_json:
        about = {"shards": len(urls), "samples": verifier.samples, "problems": problems}
        click.echo(json.dumps(about, indent=2))
    read = options.amount(verifier.samples, "sample")
    shards = options.amount(len(urls), "shard")
    options.report(f"{read} in {shards}, {options.amount(len(problems), 'problem')}")
    if problems:
        sys.exit(2 if verifier.not_there == len(urls) else 1)
