"""`energon repair`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from energon.cli.command_group import NotCheckedError, echo, echo_json
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    allow_option,
    explaining,
    options_object,
)
from energon.cli.verify import show_report
from energon.errors import EnergonError
from energon.io.epath import AnyPath

if TYPE_CHECKING:
    from energon.prepare.verify.verify import Depth


@click.command("repair")
@click.argument("path", type=ADDRESS)
@click.option("--drop", is_flag=True, help="Remove lost shards from the dataset and its splits.")
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Write lost shards and samples to FILE, for `energon prepare --exclude-from`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options_object(IndexingOptions, name="indexing")
@allow_option
def command(
    path: AnyPath,
    drop: bool,
    quarantine: str | None,
    as_json: bool,
    indexing: IndexingOptions,
) -> None:
    """Rewrite what is missing, damaged or out of date in the index of the dataset at PATH.

    Checks the dataset like `energon verify`, reindexes shards that have changed or whose index is
    wrong, and updates the list of shards and index.sqlite. Changes splits only with --drop,
    and never shards or descriptions. Cannot restore lost contents of shards. PATH may be a URL.

    Exits with 0 if everything is repaired, 1 if something is still wrong, 2 if the dataset cannot
    be checked or repaired.

    \b
    Example:
      energon repair ./coco
      energon repair ./coco --drop --quarantine lost.jsonl
      energon repair s3://bucket/coco
    """
    from energon.prepare.verify.dataset import repair_dataset
    from energon.prepare.verify.quarantine import check_quarantine

    try:
        if quarantine is not None:
            check_quarantine(quarantine, is_metadataset=False)
        with explaining(path), indexing.open("verifying shards") as how:
            depth: Depth = "content" if indexing.checksum else "headers"
            done = repair_dataset(path, depth=depth, drop=drop, quarantine=quarantine, indexing=how)
    except EnergonError as error:
        raise NotCheckedError(str(error)) from error
    if as_json:
        result = {
            "before": done.before.to_json(),
            "after": done.after.to_json(),
            "indexed": done.indexed,
            "dropped": done.dropped,
        }
        echo_json(result)
    else:
        for name in done.indexed:
            echo(f"indexed again: {name}")
        for name in done.dropped:
            echo(f"dropped: {name}")
        show_report(done.after)
    sys.exit(0 if done.after.ok else 1)
