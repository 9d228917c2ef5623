"""`energon verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from energon.cli.command_group import NotCheckedError, echo, echo_json
from energon.cli.options import (
    ADDRESS,
    ReadingOptions,
    allow_option,
    explaining,
    options_object,
)
from energon.errors import EnergonError
from energon.io.epath import AnyPath
from energon.messages import counted, shell_word

if TYPE_CHECKING:
    from energon.prepare.upkeep import Report
    from energon.prepare.verify.shard import Depth

MAX_PROBLEMS = 50


@click.command("verify")
@click.argument("path", type=ADDRESS)
@click.option("--quick", is_flag=True, help="Compare only sizes and dates, without reading shards.")
@click.option("--checksum", is_flag=True, help="Read all contents and compare their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--quarantine",
    metavar="FILE",
    help="Write lost shards and samples to FILE, for `energon prepare --exclude-from`.",
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

    Compares the size and date of every shard with its index, all headers with the positions of
    samples and parts in the index, the index with its own checksums, and shards, splits and
    index.sqlite with each other. With --checksum, contents are compared with the checksums stored
    by `energon pack`, ShardWriter and `energon prepare --checksum`. PATH may be a URL: the index
    is downloaded, and only the compared bytes of shards are read.

    Exits with 0 if there are no problems, 1 if there are, 2 if the dataset cannot be checked.

    \b
    Example:
      energon verify ./coco
      energon verify ./coco --checksum --json | jq '.problems[].message'
      energon verify s3://bucket/coco --quick
    """
    from energon.prepare.verify.dataset import verify_dataset
    from energon.prepare.verify.repair import write_lost

    if quick and checksum:
        raise click.UsageError("choose one of --quick and --checksum")
    depth: Depth = "quick" if quick else "content" if checksum else "headers"
    try:
        with reading.open("verifying shards") as how, explaining(path):
            report = verify_dataset(path, depth=depth, engine=how.engine, progress=how.progress)
        if quarantine is not None:
            write_lost(quarantine, report)
    except EnergonError as error:
        raise NotCheckedError(str(error)) from error
    if as_json:
        echo_json(report.to_json())
    else:
        show_report(report)
    sys.exit(0 if report.ok else 1)


def show_report(report: Report) -> None:
    """Print the result of checking a dataset."""
    for problem in report.problems[:MAX_PROBLEMS]:
        echo(f"{problem.kind}: {problem.message}")
    if len(report.problems) > MAX_PROBLEMS:
        rest = counted(len(report.problems) - MAX_PROBLEMS, "problem")
        echo(f"… and {rest} more; --json shows all")
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
    from energon.prepare.upkeep import LOST

    if any(problem.kind in LOST for problem in report.problems):
        echo(
            "restore the lost shards from a copy, or continue without them: "
            f"`energon repair {shell_word(report.dataset)} --drop`"
        )
