"""Commands of `energon tar` that read: `ls`, `index`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import islice

import click

from energon.cli import tar
from energon.cli.command_group import echo, write_output
from energon.cli.options import option, options_object, progress_bar
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.compressed import HEAD_BYTES, compression_of
from energon.formats.json_text import parse_json
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.scan import encode_tar_index
from energon.io.address import address_name, is_remote, local_path, redact, scheme_of
from energon.io.atomic import temporary_folder
from energon.io.files import is_file, read_bytes, write_bytes
from energon.messages import counted, shell_word
from energon.prepare.index.index import IndexOptions, ShardFile, index_remote, index_shard
from energon.webdataset.gopen import open_url


def can_have_index(url: str) -> bool:
    """Return whether an index can be written next to a shard: web servers are read-only."""
    return scheme_of(url) not in ("http", "https")


def index_anywhere(url: str) -> int:
    """Write the index of a shard next to it, if missing; return its number of samples.

    Shards in a store are read by ranges: their headers, and content where skipping it would take
    longer.

    Raises:
        ConfigError: If the shard is compressed, or not a file.
        FormatError: If it is damaged, truncated or has no samples.
    """
    check_plain(url)
    if not is_remote(url):
        return index_shard(local_path(url)).num_samples
    return _index_remote(url).num_samples


def check_plain(url: str) -> None:
    """Raise ConfigError if the samples of a shard have no positions to index."""
    if url == "-" or url.startswith("pipe:"):
        raise ConfigError(
            f"{redact(url)}: a stream has no place for an index; write it to a file first"
        )
    stream = open_url(url)
    try:
        is_packed = compression_of(stream.read(HEAD_BYTES) or b"") is not None
    finally:
        stream.close()
    if is_packed:
        raise ConfigError(
            f"{redact(url)}: is compressed, so its samples cannot be read one by one; write a "
            f"plain shard with `energon tar cat {shell_word(redact(url))} -o NAME.tar`"
        )


def _index_remote(url: str) -> PartTable:
    with temporary_folder("index") as folder:
        copy = folder / address_name(url)
        parts, index = _beside(url)
        before = _content(parts)
        if before is not None:
            part_table_path(copy).write_bytes(before)
        table = index_remote(ShardFile(url), copy, IndexOptions())
    content = table.to_bytes()
    if content != before or not is_file(index):
        write_bytes(parts, content)
        # Readers use an index as soon as this file exists.
        write_bytes(index, encode_tar_index(table.sample_offset))
    return table


def _beside(url: str) -> tuple[str, str]:
    """Return the addresses of the part table and of the index of a shard."""
    return f"{url}.parts", f"{os.path.splitext(url)[0]}.tar.idx"


def _content(url: str) -> bytes | None:
    try:
        return read_bytes(url)
    except DatasetNotFoundError:
        return None


@click.command("ls")
@tar.inputs
@click.option("-n", "--number", type=tar.COUNT, help="Maximum number of samples.")
@click.option("--json", "as_json", is_flag=True, help="One sample per line, as JSON.")
@tar.allow
def ls_command(
    inputs: tuple[str, ...],
    number: int | None,
    as_json: bool,
    allow: tuple[str, ...],
) -> None:
    """List the samples of shards: their keys, and the fields with their sizes.

    \b
    Example:
      energon tar ls train-000000.tar | head
      energon tar ls --json 's3://bucket/train-*.tar' | jq -r .key
    """
    from energon.webdataset.tools import expand_inputs, read_samples

    urls = expand_inputs(inputs)
    for sample in islice(read_samples(urls, allow=allow, sizes=True), number):
        sizes = {name: size for name, size in sample.items() if not name.startswith("__")}
        if as_json:
            shard = redact(sample["__url__"])
            listed = {"key": sample["__key__"], "shard": shard, "fields": sizes}
            write_output(json.dumps(listed))
        else:
            fields = " ".join(f"{name}:{size}" for name, size in sizes.items())
            echo(f"{sample['__key__']} {fields}")


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
    from energon.io.files import read_document
    from energon.webdataset.tools import expand_inputs
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
        info = None if how.info is None else parse_json(read_document(how.info), origin=how.info)
        with progress_bar(progress, "listing", "shards") as advance:
            done = iter(range(1, len(urls) + 1))
            descriptor = create_descriptor(
                urls,
                name=how.name,
                base=how.base,
                info=info,
                checksum=how.checksum,
                progress=lambda: advance(next(done), len(urls)),
            )
        save_descriptor(descriptor, how.wids)
        samples = sum(shard.nsamples for shard in descriptor.shards)
    text = f"{counted(samples, 'sample')} in {counted(len(urls), 'shard')}"
    tar.report(text, {"samples": samples, "shards": len(urls)}, as_json=as_json)
