"""`energon index`, and preparing datasets that consist of single files, for `energon prepare`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from energon.cli.command_group import echo, echo_json, is_quiet
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    allow_option,
    explaining,
    local_folder,
    logging_to_terminal,
    options_object,
    progress_bar,
    refuse_options,
    show_size,
)
from energon.io.address import redact
from energon.io.epath import AnyPath

if TYPE_CHECKING:
    from energon.prepare.verify.verify import Upkeep

_HONOURED = {
    *("ratio", "exclude_from", "as_json"),
    # Does not exist there, never prompts, and reads everything again in this process alone:
    *("no_sqlite", "skip_dataset_yaml", "non_interactive", "overwrite", "write"),
    *("reindex", "wait", "num_workers", "progress"),
}


def prepare_file(
    context: click.Context,
    path: AnyPath,
    upkeep: Upkeep,
    *,
    split_ratio: str | None = None,
    exclude_from: Sequence[str] = (),
    as_json: bool = False,
    progress: bool = True,
) -> None:
    """Prepare a dataset as its kind does, and print how many samples it has.

    Raises:
        ConfigError: If options were given that do not apply to such files.
    """
    from energon.prepare.splits import parse_ratio

    refuse_options(context, f"{redact(path)} is {upkeep.noun}", _HONOURED)
    with logging_to_terminal(), progress_bar(progress, "indexing lines", "MB") as advance:
        num_samples = upkeep.prepare(
            os.fspath(path),
            split_ratio=parse_ratio(split_ratio) if split_ratio else None,
            exclude_from=exclude_from,
            progress=lambda done, total: advance(done // 1_000_000, total // 1_000_000),
        )
    if as_json:
        echo_json({"path": redact(path), "samples": num_samples})
    elif not is_quiet():
        echo(f"Done. Found {num_samples} samples.")  # scripts look for it


@click.command("index")
@click.argument("path", type=ADDRESS)
@click.option("--no-sqlite", is_flag=True, help="Do not write index.sqlite.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options_object(IndexingOptions, name="indexing")
@allow_option
@click.pass_context
def command(
    context: click.Context,
    /,
    path: AnyPath,
    no_sqlite: bool,
    as_json: bool,
    indexing: IndexingOptions,
) -> None:
    """Bring the index of the prepared dataset at PATH up to date, index.sqlite included.

    Rereads shards that have changed, and leaves splits and descriptions unchanged. Also writes
    the index.sqlite that `energon prepare --no-sqlite` skipped, for tools that look up samples by
    name; training does not need it.

    \b
    Example:
      energon prepare ./coco --split-ratio 8,1,1 --no-sqlite
      energon index ./coco
    """
    from energon.prepare.dataset import reindex_dataset
    from energon.prepare.verify.verify import upkeep_of

    upkeep = upkeep_of(path, compressed=True)
    if upkeep is not None:
        prepare_file(context, path, upkeep, as_json=as_json, progress=indexing.progress)
        return
    with explaining(path), local_folder(path, indexing) as (folder, left), left.open() as how:
        info = reindex_dataset(folder, replace(how, sqlite=not no_sqlite))
    show_size(info, path, as_json=as_json)
