"""`energon lint`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from energon.cli.main import RefusedCommandError, echo, echo_json
from energon.cli.options import (
    ReadingOptions,
    allow_option,
    load_encoder,
    option,
    options_object,
)
from energon.errors import ConfigError, EnergonError
from energon.io.epath import any_path
from energon.messages import counted
from energon.metadataset.kind import kind_entry

if TYPE_CHECKING:
    from energon.inspect.lint import LintReport

MAX_FINDINGS = 50
MAX_PARTS = 5


@dataclass(frozen=True)
class LintOptions:
    """The options of the command, see its help."""

    splits: tuple[str, ...] = option(
        "--split",
        "--split-part",
        metavar="NAME",
        multiple=True,
        show_default="all",
        help="Only this split; may be repeated, or several separated by commas.",
    )
    split_parts: str | None = option(hidden=True, help="Splits, separated by commas.")
    parallel: int | None = option(type=click.IntRange(1), hidden=True, help="Same as --workers.")
    max_samples: int | None = option(
        "-n",
        "--max-samples",
        metavar="N",
        type=click.IntRange(1),
        help="Check N samples of each dataset, spread over all of its splits.",
        show_default="all",
    )
    dataset_config: str | None = option(
        metavar="NAME",
        help="File below .nv-meta that describes samples.",
        show_default="dataset.yaml",
    )
    split_config: str | None = option(
        metavar="NAME", help="File below .nv-meta that lists the splits.", show_default="split.yaml"
    )
    exclude_from: str | None = option(
        metavar="PLACE",
        help="Exclude the samples in a quarantine file, or in a folder with one per dataset.",
    )
    task_encoder: str | None = option(
        metavar="MODULE:CLASS",
        help="Also run the hooks that take single samples, and report failures by hook.",
    )
    quarantine: str | None = option(
        metavar="FILE", help="Write failed samples to FILE, for `energon prepare --exclude-from`."
    )
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")


@click.command("lint")
@click.argument("path")
@options_object(LintOptions)
@allow_option
@options_object(ReadingOptions, name="reading")
def command(path: str, options: LintOptions, reading: ReadingOptions) -> None:
    """Decode the samples of the dataset or metadataset at PATH, and report those that fail.

    PATH may also be filesystem://FOLDER, to decode its files.

    Exits with 0 if nothing fails, 1 if something does, 2 if nothing could be checked.

    \b
    Example:
      energon lint ./coco --quarantine bad.jsonl
      energon lint ./blend.yaml --split train --max-samples 1000 --json | jq '.problems[].reason'
      energon lint ./blend.yaml --task-encoder train:Encoder -n 100
    """
    from energon.inspect import lint
    from energon.metadataset.kind import dataset_kind
    from energon.prepare.verify.quarantine import check_quarantine
    from energon.sources.files.open import folder_of

    named = (*options.splits, *([options.split_parts] if options.split_parts else []))
    splits = tuple(name for each in named for name in each.split(","))
    if options.exclude_from is not None and not any_path(options.exclude_from).exists():
        raise ConfigError(f"--exclude-from {options.exclude_from}: no such file or folder")
    if options.quarantine is not None:
        is_metadataset = folder_of(path) is None and dataset_kind(path) == "metadataset"
        check_quarantine(options.quarantine, is_metadataset=is_metadataset)
    if options.parallel is not None:
        reading = replace(reading, num_workers=options.parallel)
    try:
        with reading.open("checking samples") as how:
            report = lint.lint_dataset(
                path,
                splits=splits,
                max_samples=options.max_samples,
                dataset_config=options.dataset_config,
                split_config=options.split_config,
                exclude_from=options.exclude_from,
                task_encoder=load_encoder(options.task_encoder),
                engine=how.engine,
                progress=how.progress,
            )
        if options.quarantine is not None:
            lint.quarantine(report, options.quarantine)
    except EnergonError as error:
        raise RefusedCommandError(str(error)) from error
    if options.as_json:
        echo_json(report.to_json())
    else:
        _show(report)
    if report.ok:
        return
    sys.exit(1 if any(report.num_samples.values()) else RefusedCommandError.exit_code)


def _show(report: LintReport) -> None:
    noun = "sample" if kind_entry(report.kind).has_samples else "file"
    groups = report.groups()
    for group in groups[:MAX_FINDINGS]:
        echo(group.line(noun))
    if len(groups) > MAX_FINDINGS:
        echo(f"… and {len(groups) - MAX_FINDINGS} more kinds of problems; --json shows all")
    for part, count in report.unchecked.items():
        parts = counted(count, f"{part} part was", f"{part} parts were")
        echo(f"note: {parts} not decoded, see --allow")
    for dataset, lacking in report.lacking.items():
        shown = [f"{part} (missing from {count})" for part, count in lacking.items()]
        if len(shown) > MAX_PARTS:
            shown[MAX_PARTS:] = [f"{counted(len(shown) - MAX_PARTS, 'other part')}"]
        echo(
            f"note: {dataset}: some samples lack parts that others have: {', '.join(shown)}. "
            "Batches of crude samples contain None for these; map parts that mean the same to one "
            "field, or use a cooker"
        )
    total = sum(report.num_samples.values())
    problems = counted(len(report.findings), "problem") if report.findings else "no problems"
    echo(f"{counted(total, noun)}: {problems}")
