"""The commands of `energon tar`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from energon.cli.main import echo, write_output
from energon.cli.options import (
    COUNT,
    POSITIVE,
    SIZE,
    json_option,
    option,
    options_object,
    progress_bar,
    progress_option,
    report_result,
    reporting_progress,
    tar_allow_option,
    tar_inputs,
)
from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.compressed import HEAD_BYTES, compression_of
from energon.formats.tables.part_table import part_table_path
from energon.formats.tar.headers import split_name
from energon.formats.tar.parser import StreamSample
from energon.formats.tar.scan import encode_tar_index
from energon.formats.text import parse_json
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    local_path,
    redact,
    scheme_of,
)
from energon.io.atomic import temporary_folder
from energon.io.backends.local import walk_files
from energon.io.files import is_file, read_bytes, read_document, read_text, write_bytes
from energon.messages import counted, shell_word
from energon.prepare.engines import Engine
from energon.prepare.index import IndexOptions, ShardFile, index_remote, index_shard
from energon.webdataset import security, tools
from energon.webdataset.descriptor import create_descriptor, save_descriptor
from energon.webdataset.gopen import open_url
from energon.webdataset.reading import urls as addresses
from energon.webdataset.tools import (
    Change,
    OnError,
    Output,
    SkipDamaged,
    expand_inputs,
    map_shards,
    read_samples,
    write_all,
)


@dataclass(frozen=True)
class OutputOptions:
    """Where samples are written, see the help of the options."""

    output: str = option(
        "-o",
        "--output",
        required=True,
        metavar="OUTPUT",
        help="Path or address, with %06d for several; - for standard output.",
    )
    maxcount: int | None = option(
        type=POSITIVE, help="Maximum number of samples in an output shard."
    )
    maxsize: float | None = option(type=SIZE, help="Maximum size of an output shard in bytes.")
    index: bool = option(
        "--index/--no-index", default=False, help="Write indexes next to local files."
    )

    def write(self, samples: Iterable[StreamSample], allow: Collection[str]) -> int:
        """Write samples, and return how many there were."""
        limits = self.maxcount, self.maxsize
        return write_all(samples, Output(self.output, *limits, index=self.index, allow=allow))


def recipe_of_folder(folder: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of the files of a folder, sorted so that samples are contiguous.

    Hidden files are ignored, like those in shards.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{redact(folder)}: no such folder; recipes are given with --recipe")
    names = [name for name, entry in walk_files(folder) if entry.is_file()]
    for name in sorted(names, key=lambda name: (split_name(name) or (name, ""), name)):
        yield name, str(root / name)


def parse_recipe(lines: Iterable[str], *, origin: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of each line; empty lines and comments (`#`) are ignored.

    Raises:
        FormatError: If a line has no source.
    """
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip() or text.startswith("#"):
            continue
        parts = text.split(maxsplit=1)
        if len(parts) < 2:
            raise FormatError(f"{origin}:{number}: {text!r} has no source; expected NAME SOURCE")
        yield parts[0], parts[1]


def read_recipe(
    entries: Iterable[tuple[str, str]], *, allowed: Collection[str] = (), base: str = "."
) -> Iterator[StreamSample]:
    """Yield the samples that a recipe describes, with local files as paths.

    Args:
        entries: Names and sources.
        allowed: What is allowed, see `security.resolve`.
        base: The base of relative paths.

    Raises:
        FormatError: If a name belongs to no sample, or the lines of a sample are not contiguous.
    """
    sample: StreamSample = {}
    seen: set[str] = set()
    for name, source in entries:
        parts = split_name(name)
        if parts is None:
            raise FormatError(
                f"{name!r} is not a name of a sample: expected KEY.FIELD, not hidden, and not "
                "below a folder like __this__"
            )
        key, field = parts
        if sample.get("__key__") != key:
            if sample:
                yield sample
            if key in seen:
                raise FormatError(
                    f"{name!r}: sample {key!r} appears again after others, so readers would see "
                    "two samples; sort the recipe, or use --sort"
                )
            seen.add(key)
            sample = {"__key__": key}
        if field in sample:
            raise FormatError(f"{name!r} is listed twice; remove one of the lines")
        sample[field] = _content(source, allowed, base)
    if sample:
        yield sample


def _content(source: str, allowed: Collection[str], base: str) -> Any:
    if source.startswith("text:"):
        return source[len("text:") :].encode()
    if source == "-":
        return sys.stdin.buffer.read()
    path = addresses.local_path(source)
    if path is not None:
        path = os.path.join(base, path)
        if not os.path.isfile(path):
            raise ConfigError(f"{path}: no such file, but the recipe names it")
        return Path(path)
    with closing(open_url(source, allowed=allowed)) as stream:
        return b"".join(iter(lambda: stream.read(1 << 20) or b"", b""))


@click.command("create")
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option(
    "-r",
    "--recipe",
    metavar="FILE",
    help="File with lines of NAME SOURCE; - for standard input. SOURCE is a path, an "
    "address, text:TEXT, or pipe:COMMAND for its output.",
)
@click.option("--base", default=".", metavar="FOLDER", help="Base of relative paths in the recipe.")
@click.option("--sort", "is_sorted", is_flag=True, help="Sort the recipe by key and field.")
@options_object(OutputOptions, name="target")
@json_option
@tar_allow_option
@progress_option
def create_command(
    folders: tuple[str, ...],
    recipe: str | None,
    base: str,
    is_sorted: bool,
    target: OutputOptions,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Create one or more tar files from a recipe or from the files in folders.

    Files of a folder are sorted; in a recipe, the files of a sample must follow one another. The
    same contents always give the same bytes.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar create --recipe list.txt -o 's3://bucket/train-%06d.tar' --maxsize 1e9
      echo '1.txt text:hello' | energon tar create --recipe - -o hello.tar
    """
    if bool(folders) == (recipe is not None):
        raise ConfigError("pass folders, or a recipe with --recipe")
    entries: Iterable[tuple[str, str]]
    if recipe is None:
        entries = (entry for folder in folders for entry in recipe_of_folder(folder))
    elif recipe == "-":
        entries = parse_recipe(sys.stdin, origin="standard input")
    else:
        entries = parse_recipe(read_text(recipe).splitlines(), origin=recipe)
    samples = read_recipe(
        sorted(entries) if is_sorted else entries, allowed=security.resolve(allow), base=base
    )
    with progress_bar(progress, "packing", "samples") as advance:
        count = target.write(reporting_progress(samples, advance), allow)
    result = {"samples": count}
    report_result(counted(count, "sample"), result, as_json=as_json, output=target.output)


@dataclass(frozen=True)
class ProcOptions:
    """The options of the command, see its help."""

    shell_command: str | None = option(
        "-c",
        "--command",
        metavar="COMMAND",
        help="Command to run for each sample, in a folder with its fields as files sample.FIELD. "
        "Afterwards, the files sample.* are the new sample.",
    )
    multi: str | None = option(
        "-m",
        "--multi",
        metavar="COMMAND",
        help="Like --command, for commands that make several samples: sample-000000.FIELD, ...",
    )
    function: str | None = option(
        metavar="MODULE:NAME",
        help="Function that takes a sample (dict of bytes), and returns one, several, or None.",
    )
    fields: str | None = option(
        "-f", "--fields", help="Fields to pass on: see --fields of `energon tar cat`."
    )
    output: str = option(
        "-o",
        "--output",
        required=True,
        metavar="FOLDER",
        help="Folder or address for the new shards, which keep their names.",
    )
    on_error: OnError = option(
        default="stop",
        show_default=True,
        type=click.Choice(["stop", "skip", "keep"]),
        help="On a failed sample: stop, skip it, or keep it unchanged.",
    )
    jobs: int = option(
        "-j",
        "--jobs",
        default=1,
        type=POSITIVE,
        show_default=True,
        help="Number of commands to run in parallel.",
    )
    num_workers: int = option(
        "--workers",
        "--num-workers",
        default=1,
        type=POSITIVE,
        show_default=True,
        help="Number of shards to process in parallel.",
    )
    overwrite: bool = option(is_flag=True, help="Rewrite shards that exist.")
    index: bool = option(
        "--index/--no-index", default=False, help="Write indexes next to local shards."
    )


@click.command("proc")
@tar_inputs
@options_object(ProcOptions, name="how")
@json_option
@tar_allow_option
@progress_option
def proc_command(
    inputs: tuple[str, ...], how: ProcOptions, allow: tuple[str, ...], progress: bool, as_json: bool
) -> None:
    """Transform every sample with a command or a Python function, shard by shard.

    Run the command again after an interruption to continue.

    \b
    Example:
      energon tar proc 'train-*.tar' -o small -c 'mogrify -resize 256x256 sample.jpg' -j 8
      energon tar proc 's3://b/in-{000..127}.tar' -o s3://b/out --function my_tools:augment
    """
    if (how.shell_command, how.multi, how.function).count(None) != 2:
        raise ConfigError("pass one of --command, --multi and --function")
    urls = expand_inputs(inputs)
    change = Change(
        command=how.shell_command or how.multi,
        function=how.function,
        many=how.multi is not None,
        on_error=how.on_error,
        threads=how.jobs,
        fields=how.fields,
        index=how.index,
        allow=allow,
    )
    targets = [join_address(how.output, address_name(url)) for url in urls]
    files = [url for url in urls if ":" not in url and url != "-"]
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise DatasetNotFoundError(f"{missing}: no such file")
    if not is_remote(how.output):
        os.makedirs(how.output, exist_ok=True)
    with progress_bar(progress, "processing", "shards") as advance:
        made = map_shards(
            change,
            urls,
            targets,
            engine=Engine(num_workers=how.num_workers),
            overwrite=how.overwrite,
            progress=advance,
        )
    text = f"{counted(len(made), 'shard')} created, {len(urls) - len(made)} already existed"
    report_result(text, {"shards": len(urls), "created": len(made)}, as_json=as_json)


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
        type=COUNT,
        metavar="N",
        help="Shuffle through a buffer of N.",
    )
    shuffle_shards: bool = option(is_flag=True, help="Read the shards in random order.")
    seed: int = option(default=0, show_default=True, help="Seed for random orders.")
    mix: int = option(
        "-m",
        "--mix",
        default=1,
        type=POSITIVE,
        metavar="N",
        help="Take samples of N shards in turn.",
    )
    sample_slice: str | None = option(
        "--slice", metavar="A:B:C", help="Samples of the result to keep."
    )
    shard_slice: str | None = option(metavar="A:B:C", help="Samples of each shard to keep.")
    max_errors: int = option(
        default=0, type=COUNT, metavar="N", help="Continue after up to N damaged shards."
    )


@click.command("cat")
@tar_inputs
@options_object(CatOptions, name="how")
@options_object(OutputOptions, name="target")
@json_option
@tar_allow_option
@progress_option
def cat_command(
    inputs: tuple[str, ...],
    how: CatOptions,
    target: OutputOptions,
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
        count = target.write(reporting_progress(samples, advance), allow)
    damaged = f", {counted(handler.count, 'damaged shard')}" if handler.count else ""
    total = counted(len(urls), "shard")
    text = f"{counted(count, 'sample')} of {total}{damaged}"
    result = {"samples": count, "shards": len(urls), "damaged": handler.count}
    report_result(text, result, as_json=as_json, output=target.output)


@dataclass(frozen=True)
class SplitOptions:
    """The options of the command, see its help."""

    count: int = option(
        "-c",
        "--count",
        default=1_000_000,
        type=POSITIVE,
        show_default=True,
        help="Maximum number of samples in a shard.",
    )
    size: float = option(
        "-s",
        "--size",
        default=1e9,
        type=SIZE,
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
    start: int = option(default=0, type=COUNT, show_default=True, help="Number of the first shard.")
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
@tar_inputs
@options_object(SplitOptions, name="how")
@json_option
@tar_allow_option
@progress_option
def split_command(
    inputs: tuple[str, ...],
    how: SplitOptions,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Split shards into shards of at most a number of samples and of bytes.

    A sample that is larger than the limit gets a shard of its own.

    \b
    Example:
      energon tar split huge.tar --size 1e9 -o part-%06d.tar
      energon tar split huge.tar -o part-%06d.tar --post 'gsutil cp {} gs://bucket/' --delete
    """
    urls = expand_inputs(inputs)
    samples = tools.sliced(read_samples(urls, allow=allow), tools.parse_slice(how.sample_slice))
    target = Output(how.output, how.count, how.size, start=how.start, index=how.index, allow=allow)
    made: list[str] = []

    def complete(name: str) -> None:
        made.append(name)
        _run_post(how.post, name, how.delete)

    with progress_bar(progress, "splitting", "samples") as advance:
        written = write_all(reporting_progress(samples, advance), target, complete)
    text = f"{counted(written, 'sample')} in {counted(len(made), 'shard')}"
    report_result(text, {"samples": written, "shards": list(map(redact, made))}, as_json=as_json)


def _run_post(post: str | None, name: str, delete: bool) -> None:
    if post is not None:
        quoted = shlex.quote(name)
        done = subprocess.run(post.replace("%s", quoted).replace("{}", quoted), shell=True)
        if done.returncode:
            raise ConfigError(f"{post!r} ended with status {done.returncode} for {name}")
    if delete:
        os.unlink(name)


def check_plain(url: str) -> None:
    """Raise ConfigError if the samples of a shard have no positions to index."""
    if url == "-" or url.startswith("pipe:"):
        raise ConfigError(
            f"{redact(url)}: a stream has no place for an index; write it to a file first"
        )
    with closing(open_url(url)) as stream:
        is_packed = compression_of(stream.read(HEAD_BYTES) or b"") is not None
    if is_packed:
        raise ConfigError(
            f"{redact(url)}: is compressed, so its samples cannot be read one by one; write a "
            f"plain shard with `energon tar cat {shell_word(redact(url))} -o NAME.tar`"
        )


def _index_remote(url: str) -> int:
    """Write the index of a shard in a store next to it, and return its number of samples.

    Headers are read by ranges, and content where skipping it would take longer.
    """
    parts, index = f"{url}.parts", f"{os.path.splitext(url)[0]}.tar.idx"
    with temporary_folder("index") as folder:
        copy = folder / address_name(url)
        before = None
        with suppress(DatasetNotFoundError):
            before = read_bytes(parts)
            part_table_path(copy).write_bytes(before)
        table = index_remote(ShardFile(url), copy, IndexOptions())
    content = table.to_bytes()
    if content != before or not is_file(index):
        write_bytes(parts, content)
        # Readers use an index as soon as this file exists.
        write_bytes(index, encode_tar_index(table.sample_offset))
    return table.num_samples


@click.command("ls")
@tar_inputs
@click.option("-n", "--number", type=COUNT, help="Maximum number of samples.")
@click.option("--json", "as_json", is_flag=True, help="One sample per line, as JSON.")
@tar_allow_option
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


_WEB_SERVERS = ("http", "https")


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
@tar_inputs
@options_object(ListingOptions, name="how")
@json_option
@tar_allow_option
@progress_option
def index_command(
    inputs: tuple[str, ...],
    how: ListingOptions,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Write an index next to each shard: how many samples it contains, and where.

    With an index, programs know the number of samples and read them by number. From a store, only
    the headers of shards are fetched. For web servers, which cannot store an index, list the
    shards with --wids.

    \b
    Example:
      energon tar index 'train-*.tar'
      energon tar index 's3://bucket/train-{000..127}.tar'
      energon tar index 'train-*.tar' --wids train.json --name train
    """
    urls = expand_inputs(inputs)
    read_only = next((url for url in urls if scheme_of(url) in _WEB_SERVERS), None)
    if read_only is not None and how.wids is None:
        raise ConfigError(
            f"{redact(read_only)}: files cannot be written beside those of a web server; "
            "list them with --wids FILE"
        )
    samples = 0
    with progress_bar(progress, "indexing", "shards") as advance:
        for number, url in enumerate(urls, 1):
            check_plain(url)
            if not is_remote(url):
                samples += index_shard(local_path(url)).num_samples
            elif scheme_of(url) not in _WEB_SERVERS:
                samples += _index_remote(url)
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
    report_result(text, {"samples": samples, "shards": len(urls)}, as_json=as_json)
