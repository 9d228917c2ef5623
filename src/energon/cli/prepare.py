"""`energon prepare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from energon.errors import ConfigError
from energon.formats.info import META

CRUDE = "CrudeWebdataset"


@click.command("prepare")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--split-ratio", metavar="RATIO", help="Splits by ratio: 8,1,1 or train:9,holdout:1.")
@click.option(
    "--split-parts",
    metavar="NAME:REGEX",
    multiple=True,
    help="Shards of a split, by a regular expression for their paths. May be repeated.",
)
@click.option(
    "--exclude", metavar="REGEX", multiple=True, help="Leave out shards with this in their path."
)
@click.option("--sample-type", metavar="CLASS", help=f"E.g. CaptioningSample, or {CRUDE}.")
@click.option("--field-map", metavar="JSON", help='From fields to parts: {"image": "jpg,png"}.')
@click.option("--dataset-yaml-name", default="dataset.yaml", show_default=True, metavar="NAME")
@click.option("--skip-dataset-yaml", is_flag=True, help="Do not describe the samples.")
@click.option("--num-workers", default=16, show_default=True, help="Processes that read shards.")
@click.option("--non-interactive", is_flag=True, help="Never ask.")
@click.option("--force-overwrite", is_flag=True, help="Prepare again without asking.")
@click.option("--progress/--no-progress", default=True, help="Show how far it is.")
def command(
    path: Path,
    split_ratio: str | None,
    split_parts: tuple[str, ...],
    exclude: tuple[str, ...],
    sample_type: str | None,
    field_map: str | None,
    dataset_yaml_name: str,
    skip_dataset_yaml: bool,
    num_workers: int,
    non_interactive: bool,
    force_overwrite: bool,
    progress: bool,
) -> None:
    """Make a folder of tar shards a dataset.

    Finds all .tar files below PATH, indexes their samples, splits them into train, val and
    test, and says how samples are decoded. Writes files beside the shards and into
    PATH/.nv-meta; the shards themselves are not changed. Shards that have not changed since
    they were indexed are not read again. Asks for what no option says, unless told not to.

    \b
    Example:
      energon prepare ./coco --split-ratio train:9,val:1 --non-interactive \\
          --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    from energon.prepare.dataset import prepare_dataset
    from energon.prepare.shards import find_shards
    from energon.prepare.splits import parse_ratio

    ask = not non_interactive and sys.stdin.isatty()
    shards = find_shards(path)
    click.echo(f"{len(shards)} shards, from {shards[0]} to {shards[-1]}", err=True)
    if (path / META / ".info.json").exists() and not force_overwrite:
        question = f"{path} is prepared already. Prepare it again?"
        if not ask:
            raise ConfigError(f"{path} is prepared already; pass --force-overwrite to do it again")
        click.confirm(question, abort=True)
    if not split_ratio and not split_parts:
        if not ask:
            raise ConfigError("say how to split with --split-ratio or --split-parts")
        split_ratio = click.prompt("Split ratio (train,val,test)", default="8,1,1")
    if not skip_dataset_yaml and sample_type is None:
        sample_type = click.prompt("Sample type", default=CRUDE) if ask else CRUDE
    mapping = _parse_field_map(field_map)
    if ask and mapping is None and sample_type not in (None, CRUDE):
        mapping = _ask_field_map(str(sample_type), path / shards[0])
    with _Bar(progress) as advance:
        info = prepare_dataset(
            path,
            split_ratio=parse_ratio(split_ratio) if split_ratio else None,
            split_parts=split_parts,
            exclude=exclude,
            sample_type=None if skip_dataset_yaml else sample_type,
            field_map=mapping,
            dataset_yaml_name=dataset_yaml_name,
            num_workers=num_workers,
            progress=advance,
        )
    click.echo(f"{info.num_samples} samples in {len(info.shard_counts)} shards", err=True)


def _parse_field_map(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--field-map {text}: {error}; wanted is JSON") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f'--field-map {text}: wanted is {{"FIELD": "PART"}}')
    return mapping


def _ask_field_map(sample_type: str, shard: Path) -> dict[str, str]:
    """Ask for the part of each field, after showing which parts the first shard has."""
    from dataclasses import MISSING, fields

    from energon.formats.tar_scan import scan_tar
    from energon.samples.registry import resolve_class

    click.echo(f"Parts of samples: {', '.join(scan_tar(shard).part_names)}", err=True)
    mapping = {}
    for field in fields(resolve_class("megatron.energon", sample_type)):
        if field.name.startswith("__"):
            continue
        required = field.default is MISSING and field.default_factory is MISSING
        answer = click.prompt(field.name, default=None if required else "", show_default=False)
        if answer:
            mapping[field.name] = answer
    return mapping


class _Bar:
    """A progress bar on standard error, if there is somebody to see it."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted and sys.stderr.isatty()

    def __enter__(self) -> _Bar:
        if self.wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            self.bar = Progress(
                "indexing shards",
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        if self.wanted:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.bar.stop()
