"""`energon prepare`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from energon.cli.command_group import GroupedCommand, echo, echo_json, is_quiet
from energon.cli.index import prepare_file
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    allow_option,
    local_folder,
    logging_to_terminal,
    options_object,
    refuse_options,
    show_size,
)
from energon.cli.prepare_choices import (
    PrepareOptions,
    answers_from_a_pipe,
    decide,
    says_yes,
)
from energon.cli.prepare_media import MediaOptions, report_json, show_media_report
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.info import META
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath
from energon.messages import counted

if TYPE_CHECKING:
    from energon.formats.meta.info import DatasetInfo
    from energon.prepare.description import Description
    from energon.prepare.media.prepare import MediaReport
    from energon.prepare.media.probe import MediaFilter
    from energon.prepare.splits import SplitRequest
    from energon.sources.kinds import DatasetKind

MAX_NESTED = 3
"""How many datasets a warning names."""
_NOBODY_IS_ASKED = ("non_interactive", "overwrite", "write", "progress", "as_json")
_OF_METADATASETS = {*_NOBODY_IS_ASKED, "num_workers"}
_INDEX_ONLY = {
    *_NOBODY_IS_ASKED,
    *("tar_index_only", "no_sqlite", "skip_dataset_yaml"),
    *("num_workers", "engine", "address", "checksum", "reindex", "wait"),
    *("by_extension", "by_header", "by_glob"),
}
"""Names of the options that apply where there is less to decide, or never matter there."""


_GROUPS = {
    "Splits": ("ratio", "parts", "by_folder", "unit", "shuffle"),
    "Shards to exclude or mend": ("exclude", "exclude_from", "fix_duplicates"),
    "Description of samples": (
        *("sample_type", "field_map", "sample_loader", "dataset_config", "skip_dataset_yaml"),
    ),
    "Metadata of media": ("by_extension", "by_header", "by_glob"),
    "Indexing": (
        *("checksum", "reindex", "no_sqlite", "tar_index_only", "wait"),
        *("num_workers", "engine", "address"),
    ),
    "Prompts": ("write", "non_interactive", "overwrite"),
}
"""The options in the help of the command."""


@click.command("prepare", cls=GroupedCommand, groups=_GROUPS)
@click.argument("path", type=ADDRESS)
@options_object(PrepareOptions)
@options_object(MediaOptions, name="media")
@options_object(IndexingOptions, name="indexing")
@allow_option
@click.pass_context
def command(
    context: click.Context,
    /,
    path: AnyPath,
    options: PrepareOptions,
    media: MediaOptions,
    indexing: IndexingOptions,
) -> None:
    """Turn a folder of tar shards into a dataset.

    Finds all .tar files below PATH, indexes their samples, splits them into train, val and
    test, and describes how samples are decoded. Writes files next to the shards and into
    PATH/.nv-meta; the shards themselves are not changed. Shards that have not changed since
    they were indexed are not read again. Prompts for anything not given as an option, unless
    told not to.

    If PATH is a metadataset (.yaml), the indexes of its joins are built. If it is a .jsonl file,
    plain, .gz or .zst, its lines are indexed, divided into splits if --split-ratio is given, and
    excluded if --exclude-from lists them. For token files, the whole index is checked; for Parquet
    files, the footers are recorded. Options that do not apply are refused.

    \b
    Example:
      energon prepare ./coco --split-ratio train:9,val:1 --non-interactive \\
          --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    if path.suffix in (".yaml", ".yml"):
        _prepare_metadataset(context, path, options.as_json)
        return
    from energon.prepare.upkeep import upkeep_of

    upkeep = upkeep_of(path, compressed=True)
    if upkeep is not None:
        prepare_file(
            context,
            path,
            upkeep,
            split_ratio=options.ratio,
            exclude_from=options.exclude_from,
            as_json=options.as_json,
            progress=indexing.progress,
        )
        return
    chosen = _chosen_media(options, media)
    kind = _kind(path)
    # Media of a folder are recorded for the datasets whose samples name its files.
    if kind is not None and kind.prepares and (chosen is None or not kind.has_files):
        _prepare_as_it_is(context, path, kind, options.as_json)
        return
    if options.tar_index_only:
        refuse_options(context, "--tar-index-only indexes known shards again", _INDEX_ONLY)
    preparation = _Preparation(path, options, chosen)
    if isinstance(path, Path):
        info, report = preparation.run(path, indexing)
    else:
        preparation.refuse_again()
        with local_folder(path, indexing, exclude=options.exclude) as (folder, left):
            info, _ = preparation.run(folder, left)
        report = None if chosen is None else _prepare_remote_media(path, chosen, indexing)
    _show(path, info, report, options.as_json)


@dataclass(frozen=True)
class _Preparation:
    """The options for a folder of shards, which may stand in for a remote one.

    Args:
        source: The path that the user gave.
        options: How to prepare it.
        media: Of which files to record metadata, if any.
    """

    source: AnyPath
    options: PrepareOptions
    media: MediaFilter | None

    @property
    def may_ask(self) -> bool:
        """Whether someone, or a pipe, may answer questions."""
        return not (self.options.non_interactive or self.options.as_json)

    def refuse_again(self) -> None:
        """Refuse a prepared dataset before all of its shards are read, if nobody may be asked."""
        is_allowed = self.options.tar_index_only or self.options.overwrite or self.may_ask
        if not is_allowed and (self.source / META / ".info.json").exists():
            raise self._prepared_already()

    def _prepared_already(self) -> ConfigError:
        return ConfigError(
            f"{self.source} is already prepared; pass --overwrite to prepare it again"
        )

    def run(
        self, folder: Path, indexing: IndexingOptions
    ) -> tuple[DatasetInfo, MediaReport | None]:
        """Prepare a folder; return its size, and the media report if it is the source."""
        from energon.prepare.dataset import prepare_shards, reindex_dataset
        from energon.prepare.media.prepare import prepare_media

        options = self.options
        if options.tar_index_only:
            with indexing.open() as how:
                return reindex_dataset(folder, replace(how, sqlite=not options.no_sqlite)), None
        split, description = self._choose(folder)
        with indexing.open() as how:
            how = replace(how, sqlite=not options.no_sqlite, fix_duplicates=options.fix_duplicates)
            info = prepare_shards(folder, split, description, exclude=options.exclude, indexing=how)
            if self.media is None or folder != self.source:
                return info, None
            media = prepare_media(folder, self.media, engine=how.engine, progress=how.progress)
            return info, media

    def _choose(self, folder: Path) -> tuple[SplitRequest, Description]:
        """Return how to split and describe the folder, if it is to be prepared."""
        from energon.prepare.dataset import without_shards
        from energon.prepare.index.index import find_shards

        ask = self.may_ask and sys.stdin.isatty()
        piped = self.may_ask and answers_from_a_pipe(self.options)
        shards = without_shards(find_shards(folder), self.options.exclude)
        if not is_quiet():
            names = f"from {shards[0]} to {shards[-1]}" if len(shards) > 1 else shards[0]
            echo(f"{counted(len(shards), 'shard')}, {names}", err=True)
        _warn_of_datasets_in(self.source)
        if (folder / META / ".info.json").exists() and not self.options.overwrite:
            if not ask and not (piped and says_yes()):
                raise self._prepared_already()
            if ask:
                click.confirm(f"{self.source} is already prepared. Prepare it again?", abort=True)
        return decide(folder, shards, self.options, ask=ask, piped=piped, source=self.source)


def _warn_of_datasets_in(source: AnyPath) -> None:
    from energon.metadataset.advice import datasets_in

    if inside := datasets_in(os.fspath(source)):
        echo(
            f"Warning: {redact(source)} contains prepared datasets "
            f"({', '.join(inside[:MAX_NESTED])}{', …' if inside[MAX_NESTED:] else ''}), "
            "whose shards become part of this dataset too. To train on several datasets, "
            "list them in a metadataset instead",
            err=True,
        )


def _show(path: AnyPath, info: DatasetInfo, report: MediaReport | None, as_json: bool) -> None:
    media = {} if report is None else {"media": report_json(report)}
    if report is not None and not as_json:
        show_media_report(report)
    show_size(info, path, as_json=as_json, **media)
    if not as_json and not is_quiet():
        echo("Done")  # scripts wait for it


def _kind(path: AnyPath) -> DatasetKind | None:
    """Return what is at a path; None if it has yet to become a dataset."""
    from energon.sources.kinds import kind_of

    try:
        return kind_of(path)
    except DatasetNotFoundError:
        return None


def _chosen_media(options: PrepareOptions, media: MediaOptions) -> MediaFilter | None:
    """Return of which files to record metadata, if any."""
    chosen = media.filter()
    if chosen is not None and (options.no_sqlite or options.tar_index_only):
        raise ConfigError(
            "media metadata are stored in index.sqlite, so drop --no-sqlite and "
            "--tar-index-only; see `energon prepare-media`"
        )
    return chosen


def _prepare_remote_media(
    path: EPath, media: MediaFilter, indexing: IndexingOptions
) -> MediaReport:
    from energon.prepare.media.prepare import prepare_remote_media

    with indexing.open("reading headers of media") as how:
        return prepare_remote_media(
            path.url, media, num_workers=indexing.num_workers, progress=how.progress
        )


def _prepare_metadataset(context: click.Context, path: AnyPath, as_json: bool) -> None:
    from energon.task_encoder.prepare_joins import prepare_metadataset

    refuse_options(context, f"{redact(path)} is a metadataset", _OF_METADATASETS)
    indexes = prepare_metadataset(path)
    if as_json:
        echo_json({"path": redact(path), "join_indexes": [str(index) for index in indexes]})
        return
    for index in indexes:
        echo(str(index))
    if indexes:
        echo(f"{counted(len(indexes), 'join index is', 'join indexes are')} up to date", err=True)
    else:
        echo(f"{redact(path)} has no joins, so there is nothing to prepare", err=True)


def _prepare_as_it_is(
    context: click.Context, path: AnyPath, kind: DatasetKind, as_json: bool
) -> None:
    """Prepare a dataset that needs no index of ours."""
    refuse_options(context, f"{redact(path)} is {kind.noun}", _NOBODY_IS_ASKED)
    with logging_to_terminal():
        num_samples = kind.prepare(os.fspath(path))
        kind.split_names(os.fspath(path))  # logs how names were understood
    if as_json:
        echo_json({"path": redact(path), "samples": num_samples})
    elif not is_quiet():
        echo(f"Done. Found {num_samples} samples.")
        if kind.hint:
            echo(f"Note: {kind.hint}", err=True)
