"""`energon lint`."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from energon.cli.command_group import NotCheckedError, echo
from energon.cli.options import allow_option, open_indexing, reading_options
from energon.errors import ConfigError, EnergonError
from energon.io.epath import any_path
from energon.messages import counted

if TYPE_CHECKING:
    from energon.inspect.lint import LintReport

MAX_SHOWN = 50


@click.command("lint")
@click.argument("path")
@click.option(
    *("--split", "--split-part", "splits"),
    metavar="NAME",
    multiple=True,
    show_default="all",
    help="Only this split; may be repeated, or several separated by commas.",
)
@click.option("--split-parts", hidden=True, help="Splits, separated by commas.")
@click.option("--parallel", type=click.IntRange(1), hidden=True, help="Another --workers.")
@click.option(
    "--max-samples",
    metavar="N",
    type=click.IntRange(1),
    help="Check N samples of each dataset, spread over all of its splits.",
    show_default="all",
)
@click.option(
    "--dataset-config",
    metavar="NAME",
    help="File below .nv-meta that describes samples.",
    show_default="dataset.yaml",
)
@click.option(
    "--split-config",
    metavar="NAME",
    help="File below .nv-meta that lists the splits.",
    show_default="split.yaml",
)
@partial(allow_option, expose_value=True)
@click.option(
    "--exclude-from",
    metavar="PLACE",
    help="Exclude what quarantine files list: a folder of them, or the file of a single dataset.",
)
@click.option(
    "--quarantine",
    metavar="FILE",
    help="List what fails in FILE, for `energon prepare --exclude-from`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@reading_options
def command(
    path: str,
    splits: tuple[str, ...],
    split_parts: str | None,
    parallel: int | None,
    max_samples: int | None,
    dataset_config: str | None,
    split_config: str | None,
    allow: tuple[str, ...],
    exclude_from: str | None,
    quarantine: str | None,
    as_json: bool,
    **indexing: Any,
) -> None:
    """Decode the samples of the dataset or metadataset at PATH, and report those that fail.

    PATH may also be filesystem://FOLDER, to decode its files.

    Exits with 0 if nothing fails, 1 if something does, 2 if nothing could be checked.

    \b
    Example:
      energon lint ./coco --quarantine bad.jsonl
      energon lint ./blend.yaml --split train --max-samples 1000 --json | jq '.problems[].reason'
    """
    from energon.inspect import lint

    named = (*splits, *([split_parts] if split_parts else []))
    splits = tuple(name for each in named for name in each.split(","))
    if exclude_from is not None and not any_path(exclude_from).exists():
        raise ConfigError(f"--exclude-from {exclude_from}: no such file or folder")
    if parallel is not None:
        indexing["num_workers"] = parallel
    try:
        with open_indexing(doing="checking samples", **indexing) as how:
            report = lint.lint_dataset(
                path,
                splits=splits,
                max_samples=max_samples,
                dataset_config=dataset_config,
                split_config=split_config,
                exclude_from=exclude_from,
                allow=allow,
                engine=how.engine,
                progress=how.progress,
            )
        if quarantine is not None:
            lint.quarantine(report, quarantine)
    except EnergonError as error:
        raise NotCheckedError(str(error)) from error
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        _show(report)
    if report.ok:
        return
    sys.exit(1 if any(report.num_samples.values()) else NotCheckedError.exit_code)


def _show(report: LintReport) -> None:
    noun = "file" if report.kind == "filesystem" else "sample"
    groups = report.groups()
    for group in groups[:MAX_SHOWN]:
        echo(group.line(noun))
    if len(groups) > MAX_SHOWN:
        echo(f"… and {len(groups) - MAX_SHOWN} more kinds of problems; --json shows all")
    for part, count in report.unchecked.items():
        parts = counted(count, f"{part} part was", f"{part} parts were")
        echo(f"note: {parts} not decoded, see --allow")
    total = sum(report.num_samples.values())
    problems = counted(len(report.findings), "problem") if report.findings else "no problems"
    echo(f"{counted(total, noun)}: {problems}")
