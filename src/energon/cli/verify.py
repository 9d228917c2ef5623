"""`energon verify` and `energon repair`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from energon.cli.main import RefusedCommandError, echo, echo_json
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    ReadingOptions,
    allow_option,
    explaining,
    json_option,
    options_object,
)
from energon.errors import ConfigError, EnergonError
from energon.io.address import address_name, redact
from energon.io.epath import AnyPath, any_path
from energon.messages import counted, shell_word
from energon.metadataset.kind import kind_entry

if TYPE_CHECKING:
    from energon.prepare.verify.verify import Depth, Report


MAX_PROBLEMS = 50


@click.command("verify")
@click.argument("path", type=ADDRESS)
@click.option("--quick", is_flag=True, help="Compare only sizes and dates, without reading shards.")
@click.option("--checksum", is_flag=True, help="Read all contents and compare their checksums.")
@json_option
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Write lost shards and samples to FILE, for `energon prepare --exclude-from`; "
    "for a metadataset, to a folder with one file per dataset.",
)
@options_object(ReadingOptions, name="reading")
@allow_option
def command(
    path: AnyPath,
    quick: bool,
    checksum: bool,
    as_json: bool,
    quarantine: str | None,
    reading: ReadingOptions,
) -> None:
    """Check the prepared dataset at PATH, and report problems. Changes nothing.

    Compares the size, date and headers of every shard with its index, the index with its own
    checksums, and shards, splits and index.sqlite with each other. --checksum also compares the
    contents with checksums stored by `energon pack`, ShardWriter or `energon prepare --checksum`.
    PATH may be a URL. For a metadataset (.yaml), checks all of its datasets.

    Exits with 0 if there are no problems, 1 if there are, 2 if the dataset cannot be checked.

    \b
    Example:
      energon verify ./coco
      energon verify ./coco --checksum --json | jq '.problems[].message'
      energon verify s3://bucket/coco --quick
      energon verify blend.yaml
    """
    from energon.prepare.verify.dataset import write_lost
    from energon.prepare.verify.quarantine import check_quarantine
    from energon.stages.hooks.failures import quarantine_file

    if quick and checksum:
        raise click.UsageError("choose one of --quick and --checksum")
    depth: Depth = "quick" if quick else "content" if checksum else "headers"
    several = address_name(os.fspath(path)).endswith(kind_entry("metadataset").suffixes)
    try:
        if quarantine is not None:
            check_quarantine(quarantine, is_metadataset=several)
        members = _members(path) if several else [path]
        reports = [_verify(member, depth, reading) for member in members]
        if quarantine is not None:
            if several:
                Path(quarantine).mkdir(parents=True, exist_ok=True)
            by_file: dict[str | Path, list[Report]] = {}
            for report in reports:
                file = quarantine_file(quarantine, report.dataset) if several else quarantine
                by_file.setdefault(file, []).append(report)
            for file, of_file in by_file.items():
                write_lost(file, *of_file)
    except EnergonError as error:
        raise RefusedCommandError(str(error)) from error
    ok = all(report.ok for report in reports)
    if not as_json:
        for report in reports:
            if several:
                echo(f"{report.dataset}:")
            show_report(report)
    elif several:
        datasets = [report.to_json() for report in reports]
        echo_json({"dataset": redact(path), "ok": ok, "datasets": datasets})
    else:
        echo_json(reports[0].to_json())
    sys.exit(0 if ok else 1)


def _members(metadataset: AnyPath) -> list[AnyPath]:
    """Return the datasets that have an index to check; the others are named on standard error."""
    from energon.inspect.info import find_leaves
    from energon.prepare.verify.verify import upkeep_of

    leaves = find_leaves(os.fspath(metadataset))
    if leaves.problems:
        raise ConfigError("\n".join(dict.fromkeys(reason for _, reason in leaves.problems)))
    kinds = {leaf.path: leaf.kind for of_split in leaves.splits.values() for leaf in of_split}
    members: list[AnyPath] = []
    for address, kind in kinds.items():
        if kind_entry(kind).in_shards or upkeep_of(address) is not None:
            members.append(any_path(address))
        else:
            echo(
                f"{redact(address)} is a dataset without shards ({kind}), so it has no index to "
                f"check; `energon lint {shell_word(redact(address))}` decodes its samples",
                err=True,
            )
    if not members:
        raise ConfigError(f"{redact(metadataset)}: none of its datasets has an index to check")
    return members


def _verify(path: AnyPath, depth: Depth, reading: ReadingOptions) -> Report:
    from energon.prepare.verify.dataset import verify_dataset

    with reading.open("verifying shards") as how, explaining(path):
        return verify_dataset(path, depth=depth, engine=how.engine, progress=how.progress)


def show_report(report: Report) -> None:
    """Print the result of checking a dataset."""
    for problem in report.problems[:MAX_PROBLEMS]:
        echo(f"{problem.kind}: {problem.message}")
    if len(report.problems) > MAX_PROBLEMS:
        more = counted(len(report.problems) - MAX_PROBLEMS, "problem")
        echo(f"… and {more} more; --json shows all")
    for note in report.notes:
        echo(f"note: {note}")
    checked = f"{counted(report.num_samples, 'sample')} in {counted(report.num_shards, 'shard')}"
    if report.num_checksums:
        checked += f", {counted(report.num_checksums, 'checksum')}"
    if report.ok:
        echo(f"{checked}: no problems")
        return
    repairable = sum(problem.repairable for problem in report.problems)
    problems = counted(len(report.problems), "problem")
    echo(f"{checked}: {problems}, {repairable} can be repaired")
    if repairable:
        echo(f"run `energon repair {shell_word(report.dataset)}`")
    from energon.prepare.verify.verify import LOST

    if any(problem.kind in LOST for problem in report.problems):
        echo(
            "restore the lost shards from a copy, or continue without them: "
            f"`energon repair {shell_word(report.dataset)} --drop`"
        )


@click.command("repair")
@click.argument("path", type=ADDRESS)
@click.option("--drop", is_flag=True, help="Remove lost shards from the dataset and its splits.")
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Write lost shards and samples to FILE, for `energon prepare --exclude-from`.",
)
@json_option
@options_object(IndexingOptions, name="indexing")
@allow_option
def repair_command(
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
        raise RefusedCommandError(str(error)) from error
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
