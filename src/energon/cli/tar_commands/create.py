"""`energon tar create`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from energon.cli.tar_commands import options


@click.command("create")
@click.argument("folders", nargs=-1, metavar="[FOLDER...]")
@click.option(
    "-r",
    "--recipe",
    metavar="FILE",
    help="Lines of NAME SOURCE, - for standard input. A SOURCE is a path, an address, text:... "
    "for the text itself, or pipe:... for what a command writes.",
)
@click.option("--base", default=".", metavar="FOLDER", help="What paths in the recipe start from.")
@click.option("--sort", "is_sorted", is_flag=True, help="Sort the recipe by key and field.")
@options.output
@options.allow
@options.progress
def command(
    folders: tuple[str, ...],
    recipe: str | None,
    base: str,
    is_sorted: bool,
    output: str,
    maxcount: int | None,
    maxsize: float | None,
    index: bool,
    allow: tuple[str, ...],
    progress: bool,
) -> None:
    """Make a tar file, or several, by a recipe or of the files in folders.

    Files of one sample have to follow one another; those of a folder are sorted so that they do.
    The result depends on the contents only: not on time, owner, or the order on disk.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar create --recipe list.txt -o 's3://bucket/train-%06d.tar' --maxsize 1e9
      echo '1.txt text:hello' | energon tar create --recipe - -o hello.tar
    """
    from energon.errors import ConfigError
    from energon.io.files import read_text
    from energon.webdataset import security
    from energon.webdataset.tools.recipe import parse_recipe, read_recipe, recipe_of_folder
    from energon.webdataset.tools.streams import Output, write_all

    if bool(folders) == (recipe is not None):
        raise ConfigError("say what to pack: folders, or a recipe with --recipe")
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
    target = Output(output, maxcount, maxsize, index=index, allow=allow)
    with options.progress_bar(progress, "packing", "samples") as advance:
        count = write_all(options.counted(samples, advance), target)
    options.report(options.amount(count, "sample"))
