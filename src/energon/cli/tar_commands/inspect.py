"""Commands of `energon tar` that read: `ls`, `stat`, `verify`, `index`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice

import click

from energon.cli import tar
from energon.cli.command_group import echo, echo_json, write_output
from energon.cli.options import option, options_object, progress_bar
from energon.formats.json_text import parse_json
from energon.io.address import redact
from energon.messages import counted


@click.command("ls")
@tar.inputs
@click.option("-n", "--number", type=tar.COUNT, help="Maximum number of samples.")
@click.option("--members", is_flag=True, help="One file per line, including files of no sample.")
@click.option("--json", "as_json", is_flag=True, help="One sample per line, as JSON.")
@tar.allow
def ls_command(
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
            shard = redact(sample["__url__"])
            about = {"key": sample["__key__"], "shard": shard, "fields": sizes}
            write_output(json.dumps(about))
        else:
            fields = " ".join(f"{name}:{size}" for name, size in sizes.items())
            echo(f"{sample['__key__']} {fields}")


@click.command("stat")
@tar.inputs
@tar.json_option
@tar.allow
@tar.progress
def stat_command(
    inputs: tuple[str, ...], as_json: bool, allow: tuple[str, ...], progress: bool
) -> None:
    """Count samples, fields and bytes of shards, and which fields occur together.

    \b
    Example:
      energon tar stat 'train-*.tar'
      energon tar stat --json 's3://bucket/train-*.tar' | jq .samples
    """
    from energon.webdataset.tools.inspect import Statistics, count
    from energon.webdataset.tools.streams import expand_inputs

    urls = expand_inputs(inputs)
    found = Statistics()
    with progress_bar(progress, "counting", "shards") as advance:
        for found in count(urls, allow=allow):
            advance(found.shards, len(urls))
    about = found.to_json()
    if as_json:
        echo_json(about)
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
        echo(f"{counted(layout['samples'], 'sample')} with {' '.join(layout['fields'])}")


@click.command("verify")
@tar.inputs
@click.option("--decode", is_flag=True, help="Also decode images, arrays, JSON, ...")
@tar.json_option
@tar.allow
@tar.progress
def verify_command(
    inputs: tuple[str, ...],
    decode: bool,
    as_json: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Read whole shards, and report problems.

    Finds truncated or damaged shards, samples whose files are not adjacent, duplicate keys, and
    names that readers cannot or should not use. Exits with 1 if there are problems, 2 if no shard
    can be read.

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
    with progress_bar(progress, "verifying", "shards") as advance:
        for number, url in enumerate(urls, 1):
            found = verifier.check(url)
            problems += found
            if not as_json:
                for problem in found:
                    echo(problem)
            advance(number, len(urls))
    if as_json:
        about = {"shards": len(urls), "samples": verifier.samples, "problems": problems}
        echo_json(about)
    read = counted(verifier.samples, "sample")
    shards = counted(len(urls), "shard")
    echo(f"{read} in {shards}, {counted(len(problems), 'problem')}", err=True)
    if problems:
        sys.exit(2 if verifier.not_there == len(urls) else 1)


@dataclass(frozen=True)
class ListingOptions:
    """The options of the command, see its help."""

    wids: str | None = option(
        metavar="FILE", help="Write a list of the shards as JSON, with counts."
    )
    name: str | None = option(help="Name of the dataset in that list.")
    base: str | None = option(help="Base of relative addresses in that list.")
    info: str | None = option(metavar="FILE", help="JSON file to store in that list.")
    checksum: bool = option(is_flag=True, help="Read the contents too, and store checksums.")


@click.command("index")
@tar.inputs
@options_object(ListingOptions, name="how")
@tar.json_option
@tar.allow
@tar.progress
def index_command(
    inputs: tuple[str, ...],
    how: ListingOptions,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Write an index next to each shard: how many samples it contains, and where.

    With an index, the number of samples is known, and samples can be read by number, also from
    remote shards. Of shards in a store, only the headers are fetched. Web servers cannot store an
    index; use --wids to list their shards.

    \b
    Example:
      energon tar index 'train-*.tar'
      energon tar index 's3://bucket/train-{000..127}.tar'
      energon tar index 'train-*.tar' --wids train.json --name train
    """
    from energon.errors import ConfigError
    from energon.io.files import read_document
    from energon.webdataset.tools.inspect import can_have_index, check_plain, index_anywhere
    from energon.webdataset.tools.streams import expand_inputs
    from energon.webdataset.wids import create_descriptor, save_descriptor

    urls = expand_inputs(inputs)
    for url in urls:
        if how.wids is None and not can_have_index(url):
            raise ConfigError(
                f"{redact(url)}: files cannot be written beside those of a web server; list them "
                "with --wids FILE"
            )
    samples = 0
    with progress_bar(progress, "indexing", "shards") as advance:
        for number, url in enumerate(urls, 1):
            if can_have_index(url):
                samples += index_anywhere(url)
            else:
                check_plain(url)
            advance(number, len(urls))
    if how.wids is not None:
        about = None if how.info is None else parse_json(read_document(how.info), origin=how.info)
        with progress_bar(progress, "listing", "shards") as advance:
            done = iter(range(1, len(urls) + 1))
            found = create_descriptor(
                urls,
                name=how.name,
                base=how.base,
                info=about,
                checksum=how.checksum,
                progress=lambda: advance(next(done), len(urls)),
            )
        save_descriptor(found, how.wids)
        samples = sum(shard.nsamples for shard in found.shards)
    text = f"{counted(samples, 'sample')} in {counted(len(urls), 'shard')}"
    tar.report(text, {"samples": samples, "shards": len(urls)}, as_json=as_json)
