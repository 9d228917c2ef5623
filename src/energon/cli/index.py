"""`energon index`."""

from __future__ import annotations

from typing import Any

import click

from energon.cli.address import ADDRESS, folder_of
from energon.cli.indexing_options import indexing_options, open_indexing, show_size
from energon.cli.options import allow_option
from energon.cli.prepare_file import prepare_file
from energon.io.epath import AnyPath


@click.command("index")
@click.argument("path", type=ADDRESS)
@click.option("--no-sqlite", is_flag=True, help="Leave index.sqlite out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@indexing_options
@allow_option
@click.pass_context
def command(
    context: click.Context, /, path: AnyPath, no_sqlite: bool, as_json: bool, **indexing: Any
) -> None:
    """Bring the index of the prepared dataset at PATH up to date, index.sqlite included.

    Takes the shards that the dataset consists of, reads those again that have changed, and
    leaves splits and descriptions as they are. Makes the index.sqlite that `energon prepare
    --no-sqlite` has left out: plain training does not need it; other tools, that look up
    samples by name, do.

    \b
    Example:
      energon prepare ./coco --split-ratio 8,1,1 --no-sqlite
      energon index ./coco
    """
    from energon.prepare.index.reindex import reindex_dataset
    from energon.prepare.upkeep import upkeep_of

    upkeep = upkeep_of(path, compressed=True)
    if upkeep is not None:
        prepare_file(context, path, upkeep, as_json=as_json)
        return
    with folder_of(path, **indexing) as folder:
        if folder != path:
            indexing["reindex"] = False  # all has been read anew, to fill the folder
        with open_indexing(sqlite=not no_sqlite, **indexing) as how:
            info = reindex_dataset(folder, how)
    show_size(info, path, as_json=as_json)
