"""`energon tar index`."""

from __future__ import annotations

import click

from energon.cli.tar_commands import options
from energon.formats.json_text import parse_json


@click.command("index")
@options.inputs
@click.option("--wids", metavar="FILE", help="Write a list of the shards as JSON, with counts.")
@click.option("--name", help="Name of the dataset in that list.")
@click.option("--base", help="What relative addresses in that list start from.")
@click.option("--info", metavar="FILE", help="JSON to keep in that list.")
@click.option("--checksum", is_flag=True, help="Read all of the shards, for checksums.")
@options.allow
@options.progress
def command(
    inputs: tuple[str, ...],
    wids: str | None,
    name: str | None,
    base: str | None,
    info: str | None,
    checksum: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Write the index of shards beside them: how many samples they have, and where.

    With an index, lengths are known, samples are read by number, and distant shards in parts.
    Shards in a store are not fetched for that: only their headers are, by ranges. Those of web
    servers can be listed with --wids; their indexes would have no place to go.

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
        if wids is None and not can_have_index(url):
            raise ConfigError(
                f"{url}: there is no writing beside files of a web server; list them with "
                "--wids FILE"
            )
    samples = 0
    with options.progress_bar(progress, "indexing", "shards") as advance:
        for number, url in enumerate(urls, 1):
            if can_have_index(url):
                samples += index_anywhere(url)
            else:
                check_plain(url)
            advance(number, len(urls))
    if wids is not None:
        about = None if info is None else parse_json(read_document(info), origin=info)
        with options.progress_bar(progress, "listing", "shards") as advance:
            done = iter(range(1, len(urls) + 1))
            found = create_descriptor(
                urls,
                name=name,
                base=base,
                info=about,
                checksum=checksum,
                progress=lambda: advance(next(done), len(urls)),
            )
        save_descriptor(found, wids)
        samples = sum(shard.nsamples for shard in found.shards)
    options.report(f"{options.amount(samples, 'sample')} in {options.amount(len(urls), 'shard')}")
