"""Commands of `energon tar` that create shards from files, or by transforming samples.

Shards are built from recipes: lines with the name of a member and the source of its content.

    000001.jpg photos/a.jpg
    000001.txt text:a cat on a mat
    000001.json s3://bucket/a.json
    000001.cls pipe:classify photos/a.jpg
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon.cli import tar
from energon.cli.options import option, options_object, progress_bar
from energon.errors import ConfigError, FormatError
from energon.formats.tar.names import split_name
from energon.formats.tar.sample_parser import StreamSample
from energon.io.address import redact
from energon.io.backends.local import walk_files
from energon.messages import counted
from energon.webdataset.gopen import open_url
from energon.webdataset.reading.urls import local_path


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
    path = local_path(source)
    if path is not None:
        path = os.path.join(base, path)
        if not os.path.isfile(path):
            raise ConfigError(f"{path}: no such file, but the recipe names it")
        return Path(path)
    stream = open_url(source, allowed=allowed)
    try:
        return b"".join(iter(lambda: stream.read(1 << 20) or b"", b""))
    finally:
        stream.close()


if TYPE_CHECKING:
    from energon.webdataset.tools import OnError, Output


@click.command("create")
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option(
    "-r",
    "--recipe",
    metavar="FILE",
    help="Lines of NAME SOURCE, - for standard input. A SOURCE is a path, an address, text:... "
    "for the text itself, or pipe:... for the output of a command.",
)
@click.option("--base", default=".", metavar="FOLDER", help="Base of relative paths in the recipe.")
@click.option("--sort", "is_sorted", is_flag=True, help="Sort the recipe by key and field.")
@tar.output
@tar.json_option
@tar.allow
@tar.progress
def create_command(
    folders: tuple[str, ...],
    recipe: str | None,
    base: str,
    is_sorted: bool,
    target: Output,
    allow: tuple[str, ...],
    progress: bool,
    as_json: bool,
) -> None:
    """Create one or more tar files from a recipe or from the files in folders.

    Files of one sample must follow one another; files of a folder are sorted to ensure that. The
    result depends only on the contents: not on time, owner, or the order on disk.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar create --recipe list.txt -o 's3://bucket/train-%06d.tar' --maxsize 1e9
      echo '1.txt text:hello' | energon tar create --recipe - -o hello.tar
    """
    from energon.io.files import read_text
    from energon.webdataset import security
    from energon.webdataset.tools import write_all

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
        count = write_all(tar.reporting_progress(samples, advance), target)
    result = {"samples": count}
    tar.report(counted(count, "sample"), result, as_json=as_json, output=target.target)


@dataclass(frozen=True)
class ProcOptions:
    """The options of the command, see its help."""

    shell_command: str | None = option(
        "-c",
        "--command",
        metavar="COMMAND",
        help="Run for each sample, in a folder with its fields as files sample.FIELD; the files "
        "sample.* that it leaves behind are the new sample.",
    )
    multi: str | None = option(
        "-m",
        "--multi",
        metavar="COMMAND",
        help="Like it, for commands that make several samples: sample-000000.FIELD, ...",
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
        help="Folder or address for the new shards, which are named like the old ones.",
    )
    on_error: OnError = option(
        default="stop",
        show_default=True,
        type=click.Choice(["stop", "skip", "keep"]),
        help="What to do with samples that fail: stop, skip them, or keep them unchanged.",
    )
    jobs: int = option(
        "-j",
        "--jobs",
        default=1,
        type=tar.POSITIVE,
        show_default=True,
        help="Number of commands to run in parallel.",
    )
    num_workers: int = option(
        "--workers",
        "--num-workers",
        default=1,
        type=tar.POSITIVE,
        show_default=True,
        help="Number of shards to process in parallel.",
    )
    overwrite: bool = option(is_flag=True, help="Rewrite shards that exist.")
    index: bool = option(
        "--index/--no-index", default=False, help="Write indexes next to local shards."
    )


@click.command("proc")
@tar.inputs
@options_object(ProcOptions, name="how")
@tar.json_option
@tar.allow
@tar.progress
def proc_command(
    inputs: tuple[str, ...], how: ProcOptions, allow: tuple[str, ...], progress: bool, as_json: bool
) -> None:
    """Transform every sample with a command or a Python function, shard by shard.

    After an interruption, run the command again to continue: existing shards are complete.

    \b
    Example:
      energon tar proc 'train-*.tar' -o small -c 'mogrify -resize 256x256 sample.jpg' -j 8
      energon tar proc 's3://b/in-{000..127}.tar' -o s3://b/out --function my_tools:augment
    """
    import os

    from energon.errors import ConfigError, DatasetNotFoundError
    from energon.io.address import address_name, is_remote, join_address
    from energon.prepare.engines import Engine
    from energon.webdataset.tools import Change, expand_inputs, map_shards

    if sum(each is not None for each in (how.shell_command, how.multi, how.function)) != 1:
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
    tar.report(text, {"shards": len(urls), "created": len(made)}, as_json=as_json)
