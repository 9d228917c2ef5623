"""`energon repair`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from energon.cli.command_group import NotCheckedError, echo, echo_json
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    allow_option,
    check_engine,
    explaining,
    options_object,
)
from energon.cli.verify import show_report
from energon.errors import EnergonError
from energon.io.epath import AnyPath

if TYPE_CHECKING:
    from energon.prepare.dataset import Indexing
    from energon.prepare.upkeep import Repair
    from energon.prepare.verify.shard import Depth


@click.command("repair")
@click.argument("path", type=ADDRESS)
@click.option("--content", is_flag=True, help="Read all contents and compare their checksums.")
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
    content: bool,
    drop: bool,
    quarantine: str | None,
    as_json: bool,
    indexing: IndexingOptions,
) -> None:
    """Rewrite what is missing, damaged or out of date in the index of the dataset at PATH.

    Checks the dataset like `energon verify`. Reindexes shards that have changed or whose index is
    wrong, and brings the list of shards and index.sqlite up to date. Shards and
    descriptions are not changed, splits only with --drop. Lost contents of shards cannot be
    repaired. PATH may be a URL: new files are uploaded.

    Exits with 0 if everything is repaired, 1 if something is still wrong, 2 if the dataset cannot
    be checked or repaired.

    \b
    Example:
      energon repair ./coco
      energon repair ./coco --drop --quarantine lost.jsonl
      energon repair s3://bucket/coco
    """
    try:
        with explaining(path), indexing.open("verifying shards") as how:
            depth: Depth = "content" if content else "headers"
            done = _repair(path, depth, how, drop=drop, quarantine=quarantine)
    except EnergonError as error:
        raise NotCheckedError(str(error)) from error
    if as_json:
        about = {
            "before": done.before.to_json(),
            "after": done.after.to_json(),
            "indexed": done.indexed,
            "dropped": done.dropped,
        }
        echo_json(about)
    else:
        for name in done.indexed:
            echo(f"indexed again: {name}")
        for name in done.dropped:
            echo(f"dropped: {name}")
        show_report(done.after)
    sys.exit(0 if done.after.ok else 1)


def _repair(
    path: AnyPath, depth: Depth, how: Indexing, *, drop: bool, quarantine: str | None
) -> Repair:
    if isinstance(path, Path):
        from energon.prepare.verify.repair import repair_dataset

        return repair_dataset(path, depth=depth, drop=drop, quarantine=quarantine, indexing=how)
    from energon.prepare.verify.remote import repair_remote

    check_engine(path, how.engine)
    return repair_remote(path.url, depth=depth, drop=drop, quarantine=quarantine, indexing=how)
