"""`energon prepare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from energon.cli.address import ADDRESS, STANDS_FOR, run_on_stand_in
from energon.cli.field_map import parse_field_map
from energon.cli.indexing_options import indexing_options, open_indexing
from energon.cli.media_options import media_filter, media_options, show_report
from energon.cli.prepare_jsonl import is_jsonl, prepare_jsonl_command
from energon.errors import ConfigError
from energon.formats.info import META
from energon.io.epath import AnyPath


@click.command("prepare")
@click.argument("path", type=ADDRESS)
@click.option("--split-ratio", metavar="RATIO", help="Splits by ratio: 8,1,1 or train:9,holdout:1.")
@click.option(
    "--split-parts",
    metavar="NAME:REGEX",
    multiple=True,
    help="Shards of a split, by a regular expression for their paths. May be repeated.",
)
@click.option("--split-by-folder", is_flag=True, help="Make each folder of shards a split.")
@click.option(
    "--split-unit",
    type=click.Choice(["auto", "shard", "sample"]),
    default="auto",
    show_default=True,
    help="What is dealt by ratio. auto: shards, but samples if there are too few shards.",
)
@click.option("--shuffle-tars", is_flag=True, help="Shuffle shards before dealing them by ratio.")
@click.option(
    "--exclude", metavar="REGEX", multiple=True, help="Leave out shards with this in their path."
)
@click.option(
    "--exclude-from",
    metavar="FILE",
    multiple=True,
    help="Exclude what a quarantine file lists: SHARD or SHARD/KEY in each line, or JSON lines.",
)
@click.option("--sample-type", metavar="CLASS", help="E.g. CaptioningSample, or CrudeWebdataset.")
@click.option("--field-map", metavar="JSON", help='From fields to parts: {"image": "jpg,png"}.')
@click.option(
    "--sample-loader",
    is_flag=True,
    help="Code makes the samples: .nv-meta/sample_loader.py, of which a template is written.",
)
@click.option("--dataset-yaml-name", default="dataset.yaml", show_default=True, metavar="NAME")
@click.option("--skip-dataset-yaml", is_flag=True, help="Do not describe the samples.")
@click.option(
    "--fix-duplicates", is_flag=True, help="Write shards anew whose keys are there already."
)
@click.option("--no-sqlite", is_flag=True, help="No index.sqlite; `energon index` makes it later.")
@click.option(
    "--tar-index-only", is_flag=True, help="Index the known shards again; see `energon index`."
)
@click.option("--non-interactive", is_flag=True, help="Never ask.")
@click.option("--force-overwrite", is_flag=True, help="Prepare again without asking.")
@click.option("-y", "--yes", is_flag=True, help="Write what was answered without asking.")
@media_options
@indexing_options
@click.pass_context
def command(
    context: click.Context,
    /,
    path: AnyPath,
    split_ratio: str | None,
    split_parts: tuple[str, ...],
    split_by_folder: bool,
    split_unit: str,
    shuffle_tars: bool,
    exclude: tuple[str, ...],
    exclude_from: tuple[str, ...],
    sample_type: str | None,
    field_map: str | None,
    sample_loader: bool,
    dataset_yaml_name: str,
    skip_dataset_yaml: bool,
    fix_duplicates: bool,
    no_sqlite: bool,
    tar_index_only: bool,
    non_interactive: bool,
    force_overwrite: bool,
    yes: bool,
    by_extension: bool,
    by_header: bool,
    by_glob: str | None,
    **indexing: Any,
) -> None:
    """Make a folder of tar shards a dataset.

    Finds all .tar files below PATH, indexes their samples, splits them into train, val and
    test, and says how samples are decoded. Writes files beside the shards and into
    PATH/.nv-meta; the shards themselves are not changed. Shards that have not changed since
    they were indexed are not read again. Asks for what no option says, unless told not to.

    If PATH is a metadataset (.yaml), the indexes of its joins are built, and no option counts.
    If it is a .jsonl file, its lines are indexed, and dealt to splits if --split-ratio is given.

    \b
    Example:
      energon prepare ./coco --split-ratio train:9,val:1 --non-interactive \\
          --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    if path.suffix in (".yaml", ".yml"):
        _prepare_metadataset(path)
        return
    if is_jsonl(path):
        prepare_jsonl_command(path, split_ratio)
        return
    if not isinstance(path, Path):
        run_on_stand_in(context, path, exclude)
        return
    from energon.cli.prepare_choices import Options, decide
    from energon.prepare.dataset import prepare_dataset, without_shards
    from energon.prepare.shards import find_shards

    media = media_filter(by_extension, by_header, by_glob)
    if media is not None and (no_sqlite or tar_index_only):
        raise ConfigError(
            "media metadata are kept in index.sqlite, and go with neither --no-sqlite nor "
            "--tar-index-only; see `energon prepare-media`"
        )
    if tar_index_only:
        _index_only(path, sqlite=not no_sqlite, **indexing)
        return
    ask = not non_interactive and sys.stdin.isatty()
    shards = without_shards(find_shards(path), exclude)
    click.echo(f"{len(shards)} shards, from {shards[0]} to {shards[-1]}", err=True)
    source = context.meta.get(STANDS_FOR, path)
    if (path / META / ".info.json").exists() and not force_overwrite:
        question = f"{source} is prepared already. Prepare it again?"
        if not ask:
            raise ConfigError(
                f"{source} is prepared already; pass --force-overwrite to do it again"
            )
        click.confirm(question, abort=True)
    options = Options(
        ratio=split_ratio,
        parts=split_parts,
        by_folder=split_by_folder,
        unit=split_unit,
        shuffle=shuffle_tars,
        exclude_from=exclude_from,
        sample_type=sample_type,
        field_map=parse_field_map(field_map),
        sample_loader=sample_loader,
        describe=not skip_dataset_yaml,
        dataset_yaml_name=dataset_yaml_name,
        write=yes,
    )
    arguments = decide(path, shards, options, ask=ask, source=source)
    with open_indexing(sqlite=not no_sqlite, fix_duplicates=fix_duplicates, **indexing) as how:
        info = prepare_dataset(path, exclude=exclude, indexing=how, **arguments)
        if media is not None:
            from energon.prepare.media import prepare_media

            show_report(prepare_media(path, media, engine=how.engine, progress=how.progress))
    click.echo(f"{info.num_samples} samples in {len(info.shard_counts)} shards", err=True)


def _prepare_metadataset(path: AnyPath) -> None:
    from energon.task_encoder.load_dataset import prepare_metadataset

    indexes = prepare_metadataset(path)
    for index in indexes:
        click.echo(index)
    click.echo(f"{len(indexes)} join indexes are up to date", err=True)


def _index_only(path: Path, *, sqlite: bool, **indexing: Any) -> None:
    from energon.prepare.reindex import reindex_dataset

    with open_indexing(sqlite=sqlite, **indexing) as how:
        info = reindex_dataset(path, how)
    click.echo(f"{info.num_samples} samples in {len(info.shard_counts)} shards", err=True)
