"""`energon prepare`, `energon index` and `energon prepare-media`, which write the same index."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from energon.cli.main import GroupedCommand, echo, echo_json, echo_lines, is_quiet
from energon.cli.options import (
    ADDRESS,
    IndexingOptions,
    ReadingOptions,
    allow_option,
    explaining,
    json_option,
    local_folder,
    logging_to_terminal,
    option,
    options_object,
    parse_field_map,
    progress_bar,
    refuse_options,
    show_size,
)
from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.info import META
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath
from energon.messages import counted

if TYPE_CHECKING:
    from energon.formats.meta.info import DatasetInfo
    from energon.prepare.assistant import Prompt
    from energon.prepare.dataset import Description
    from energon.prepare.media import MediaFilter, MediaReport
    from energon.prepare.splits import SplitRequest
    from energon.prepare.verify.verify import Upkeep
    from energon.sources.kinds import DatasetKind


@dataclass(frozen=True)
class PrepareOptions:
    """The options of the command, see its help."""

    ratio: str | None = option(
        "--split-ratio", metavar="RATIO", help="Splits by ratio: 8,1,1 or train:9,holdout:1."
    )
    parts: Sequence[str] = option(
        "--split-parts",
        metavar="NAME:REGEX",
        multiple=True,
        help="Assign shards to a split by a regular expression for their paths; may be repeated.",
    )
    by_folder: bool = option(
        "--split-by-folder", is_flag=True, help="Make each folder of shards a split."
    )
    unit: str = option(
        "--split-unit",
        type=click.Choice(["auto", "shard", "sample"]),
        default="auto",
        show_default=True,
        help="Divide shards or samples by ratio; auto: samples if there are too few shards.",
    )
    shuffle: bool = option(
        "--shuffle-tars", is_flag=True, help="Shuffle shards before dividing them by ratio."
    )
    exclude_from: Sequence[str] = option(
        metavar="PLACE",
        multiple=True,
        help="Exclude the entries of a quarantine file (lines of SHARD or SHARD/KEY, or of "
        "JSON), or of a folder with one per dataset.",
    )
    sample_type: str | None = option(
        metavar="CLASS", help="Type of the samples, such as CaptioningSample or CrudeWebdataset."
    )
    field_map: str | None = option(
        metavar="JSON", help='The parts of each field: {"image": "jpg,png"}.'
    )
    sample_loader: bool = option(
        is_flag=True,
        help="Create samples with code: write a template of .nv-meta/sample_loader.py.",
    )
    dataset_config: str = option(
        "--dataset-config",
        "--dataset-yaml-name",
        default="dataset.yaml",
        show_default=True,
        metavar="NAME",
        help="File below .nv-meta that describes samples.",
    )
    skip_dataset_yaml: bool = option(is_flag=True, help="Do not write dataset.yaml.")
    write: bool = option("-y", "--yes", is_flag=True, help="Write without confirmation.")
    exclude: tuple[str, ...] = option(
        metavar="REGEX", multiple=True, help="Skip shards whose path matches."
    )
    fix_duplicates: bool = option(is_flag=True, help="Rewrite shards that contain duplicate keys.")
    no_sqlite: bool = option(
        is_flag=True, help="Do not write index.sqlite; `energon index` can do so later."
    )
    tar_index_only: bool = option(
        is_flag=True, help="Reindex the known shards; see `energon index`."
    )
    non_interactive: bool = option(is_flag=True, help="Never prompt.")
    tmp_path: str | None = option(hidden=True)
    overwrite: bool = option(
        "--overwrite", "--force-overwrite", is_flag=True, help="Prepare again without confirmation."
    )
    as_json: bool = option("--json", is_flag=True, help="Print JSON, for scripts; never prompt.")

    @property
    def split_settings(self) -> dict[str, Any]:
        """Settings of splits that are never prompted for."""
        return {"unit": self.unit, "shuffle": self.shuffle, "exclude_from": self.exclude_from}

    @property
    def never_prompts(self) -> bool:
        """Whether nothing is asked, whatever is missing."""
        return self.non_interactive or self.as_json

    def split(self) -> SplitRequest | None:
        """Return how to split the dataset, or None if no option says so."""
        from energon.prepare.splits import SplitRequest, parse_ratio

        if not (self.ratio or self.parts or self.by_folder):
            return None
        return SplitRequest(
            ratio=parse_ratio(self.ratio) if self.ratio else None,
            parts=self.parts,
            by_folder=self.by_folder,
            **self.split_settings,
        )


@dataclass(frozen=True)
class MediaOptions:
    """The options that select media files, see their help."""

    by_extension: bool = option(
        "--media-metadata-by-extension",
        is_flag=True,
        help="Record sizes and durations of files with extensions of images, audio or video.",
    )
    by_header: bool = option(
        "--media-metadata-by-header",
        is_flag=True,
        help="Record sizes and durations of files that contain images, audio or video.",
    )
    by_glob: str | None = option(
        "--media-metadata-by-glob",
        metavar="PATTERNS",
        help='Record sizes and durations of files that match, as in "*.left.jpg,*.mp4".',
    )

    def filter(self) -> MediaFilter | None:
        """Return which files to check; None if no option says so.

        Raises:
            ConfigError: If more than one option does.
        """
        from energon.prepare.media import MediaFilter

        strategies = {
            "EXTENSION": self.by_extension,
            "HEADER": self.by_header,
            "GLOB": self.by_glob is not None,
        }
        chosen: list[Any] = [name for name, is_chosen in strategies.items() if is_chosen]
        if len(chosen) > 1:
            raise ConfigError(
                "--media-metadata-by-extension, -by-header and -by-glob cannot be combined"
            )
        return MediaFilter(chosen[0], self.by_glob) if chosen else None


def _decide(
    folder: Path,
    shards: Sequence[str],
    options: PrepareOptions,
    prompt: Prompt | None,
    source: AnyPath,
) -> tuple[SplitRequest, Description]:
    """Return how to split a dataset, and how to describe its samples.

    Args:
        folder: Folder of the dataset.
        shards: Its shards.
        options: The options of the command.
        prompt: Asks for the rest; None takes the defaults.
        source: Where the contents of the shards are: the folder, or the one it stands for.

    Raises:
        ConfigError: If something without a default is missing, or something is invalid.
        click.Abort: If the dataset is not to be prepared.
    """
    from energon.prepare.assistant import Assistant, Choices
    from energon.prepare.dataset import CRUDE

    choices = Choices(
        split=options.split(),
        split_settings=options.split_settings,
        sample_type=options.sample_type,
        field_map=parse_field_map(options.field_map),
        sample_loader=_loader(folder, shards, options, source) if options.sample_loader else None,
        describe=not options.skip_dataset_yaml,
        dataset_yaml_name=options.dataset_config,
        write=options.write or (prompt is not None and prompt.is_scripted),
    )
    chosen: Choices | None = choices
    if prompt is None:
        if choices.split is None:
            raise ConfigError(
                "choose the splits with --split-ratio, --split-parts or --split-by-folder"
            )
        chosen = replace(
            choices, sample_type=CRUDE if choices.sample_type is None else choices.sample_type
        )
    elif not choices.is_complete:
        chosen = Assistant(folder, shards, prompt, source=source).run(choices)
    if chosen is None or chosen.split is None:
        raise click.Abort
    return chosen.split, chosen.description


def _open_prompt(options: PrepareOptions) -> Prompt | None:
    """Return the prompt at the terminal, or for the answers of a script; None to ask nothing.

    A command whose options say how to split prompts for nothing, so it leaves its standard input
    to others, such as the shell loop that reads a list of folders from it.
    """
    from rich.console import Console

    from energon.prepare.assistant import Prompt

    stdin = sys.stdin
    if options.never_prompts or stdin.closed:
        return None
    if stdin.isatty():
        return Prompt(Console())
    if options.split() is not None or not _has_input(stdin):
        return None
    return Prompt(Console(quiet=True), _next_line, is_scripted=True)


def _has_input(stream: TextIO) -> bool:
    """Return whether there is something to read now, and leave it there."""
    try:
        readable, _, _ = select.select([stream], [], [], 0)
        return bool(readable)
    except (OSError, ValueError):  # in memory, where programs and tests put answers
        if not stream.seekable():
            return False
    here = stream.tell()
    more = bool(stream.read(1))
    stream.seek(here)
    return more


def _next_line(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError(prompt)
    return line


def _loader(path: Path, shards: Sequence[str], options: PrepareOptions, source: AnyPath) -> str:
    """Return the code that makes samples: the existing file, or a template."""
    from energon.prepare.dataset import CRUDE, LOADER_FILE
    from energon.prepare.sample_fields import first_samples, loader_template
    from energon.samples.sample_types import resolve_class

    if options.sample_type is None or options.sample_type == CRUDE:
        raise ConfigError("--sample-loader needs a --sample-type whose fields the code makes")
    present = path / META / LOADER_FILE
    if present.is_file():
        return present.read_text()
    samples = first_samples(source, shards, 1)
    return loader_template(resolve_class("megatron.energon", options.sample_type), samples)


MAX_NESTED = 3
"""How many datasets a warning names."""
_NEVER_MATTER = ("non_interactive", "overwrite", "write", "progress", "as_json")
_OF_METADATASETS = {*_NEVER_MATTER, "num_workers"}
_INDEX_ONLY = {
    *_NEVER_MATTER,
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

    Finds all .tar files below PATH, indexes their samples, divides them into splits, and records
    their sample type. Prompts for anything not given as an option. Writes files next to the
    shards and into PATH/.nv-meta, and does not change the shards. Reads only new and changed
    shards.

    For a metadataset (.yaml), builds the indexes of its joins. For a .jsonl file, plain, .gz or
    .zst, indexes its lines; --split-ratio and --exclude-from apply. For token files, checks the
    index; for Parquet files, records the footers.

    \b
    Example:
      energon prepare ./coco --split-ratio train:9,val:1 --non-interactive \\
          --sample-type CaptioningSample --field-map '{"image": "jpg", "caption": "txt"}'
    """
    if path.suffix in (".yaml", ".yml"):
        _prepare_metadataset(context, path, options.as_json)
        return
    from energon.prepare.verify.verify import upkeep_of
    from energon.sources.kinds import kind_of

    upkeep = upkeep_of(path, compressed=True)
    if upkeep is not None:
        _prepare_file(
            context,
            path,
            upkeep,
            split_ratio=options.ratio,
            exclude_from=options.exclude_from,
            as_json=options.as_json,
            progress=indexing.progress,
        )
        return
    media_filter = media.filter()
    if media_filter is not None and (options.no_sqlite or options.tar_index_only):
        raise ConfigError(
            "media metadata are stored in index.sqlite, so drop --no-sqlite and "
            "--tar-index-only; see `energon prepare-media`"
        )
    kind = None
    with suppress(DatasetNotFoundError):  # it has yet to become a dataset
        kind = kind_of(path)
    # Media of a folder are recorded for the datasets whose samples name its files.
    if kind is not None and kind.prepares and (media_filter is None or not kind.has_files):
        _prepare_as_it_is(context, path, kind, options.as_json)
        return
    if options.tar_index_only:
        refuse_options(context, "--tar-index-only indexes known shards again", _INDEX_ONLY)
    elif isinstance(path, EPath) and options.never_prompts and _is_prepared(path, options):
        raise _prepared_already(path)  # before all of its shards are read
    with local_folder(path, indexing, exclude=options.exclude) as (folder, left):
        info = _prepare_shards(folder, path, options, left)
    report = None if media_filter is None else _record_media(path, media_filter, indexing)
    summary = {} if report is None else {"media": _report_json(report)}
    if report is not None and not options.as_json:
        echo(f"media metadata of {counted(report.stored, 'file')}", err=True)
        _show_failures(report)
    show_size(info, path, as_json=options.as_json, **summary)
    if not options.as_json and not is_quiet():
        echo("Done")  # scripts wait for it


def _is_prepared(folder: AnyPath, options: PrepareOptions) -> bool:
    """Return whether a folder is prepared, and not to be prepared again without confirmation."""
    return not options.overwrite and (folder / META / ".info.json").exists()


def _prepared_already(source: AnyPath) -> ConfigError:
    return ConfigError(f"{source} is already prepared; pass --overwrite to prepare it again")


def _prepare_shards(
    folder: Path, source: AnyPath, options: PrepareOptions, indexing: IndexingOptions
) -> DatasetInfo:
    """Prepare a folder of shards, which may stand in for a remote one, and return its size."""
    from energon.metadataset.kind import datasets_in
    from energon.prepare.dataset import prepare_shards, reindex_dataset, without_shards
    from energon.prepare.index import find_shards

    if options.tar_index_only:
        with indexing.open() as how:
            return reindex_dataset(folder, replace(how, sqlite=not options.no_sqlite))
    prompt = _open_prompt(options)
    shards = without_shards(find_shards(folder), options.exclude)
    if not is_quiet():
        names = f"from {shards[0]} to {shards[-1]}" if len(shards) > 1 else shards[0]
        echo(f"{counted(len(shards), 'shard')}, {names}", err=True)
    if inside := datasets_in(os.fspath(source)):
        echo(
            f"Warning: {redact(source)} contains prepared datasets "
            f"({', '.join(inside[:MAX_NESTED])}{', …' if inside[MAX_NESTED:] else ''}), "
            "whose shards become part of this dataset too. To train on several datasets, "
            "list them in a metadataset instead",
            err=True,
        )
    if _is_prepared(folder, options):
        question = f"{source} is already prepared. Prepare it again?"
        if prompt is None or not prompt.confirm(question, default=False):
            if prompt is not None and not prompt.is_scripted:
                raise click.Abort
            raise _prepared_already(source)
    split, description = _decide(folder, shards, options, prompt, source)
    with indexing.open() as how:
        how = replace(how, sqlite=not options.no_sqlite, fix_duplicates=options.fix_duplicates)
        return prepare_shards(folder, split, description, exclude=options.exclude, indexing=how)


def _record_media(
    path: AnyPath, media: MediaFilter, reading: ReadingOptions, *, wait: bool = False
) -> MediaReport:
    """Record the metadata of the media files of a dataset or folder."""
    from energon.prepare.media import prepare_media, prepare_remote_media

    with reading.open("reading headers of media") as how:
        if isinstance(path, EPath):
            return prepare_remote_media(
                path.url, media, num_workers=reading.num_workers, progress=how.progress
            )
        return prepare_media(path, media, engine=how.engine, wait=wait, progress=how.progress)


def _prepare_metadataset(context: click.Context, path: AnyPath, as_json: bool) -> None:
    from energon.task_encoder.leaves import prepare_metadataset

    refuse_options(context, f"{redact(path)} is a metadataset", _OF_METADATASETS)
    indexes = prepare_metadataset(path)
    if as_json:
        echo_json({"path": redact(path), "join_indexes": [str(index) for index in indexes]})
        return
    echo_lines(map(str, indexes))
    if indexes:
        echo(f"{counted(len(indexes), 'join index is', 'join indexes are')} up to date", err=True)
    else:
        echo(f"{redact(path)} has no joins, so there is nothing to prepare", err=True)


def _prepare_as_it_is(
    context: click.Context, path: AnyPath, kind: DatasetKind, as_json: bool
) -> None:
    """Prepare a dataset that needs no index of ours."""
    refuse_options(context, f"{redact(path)} is {kind.noun}", _NEVER_MATTER)
    with logging_to_terminal():
        num_samples = kind.prepare(os.fspath(path))
        kind.split_names(os.fspath(path))  # logs how names were understood
    _show_samples(path, num_samples, as_json)
    if kind.hint and not as_json and not is_quiet():
        echo(f"Note: {kind.hint}", err=True)


_HONOURED = {
    *("ratio", "exclude_from", "as_json"),
    # Does not exist there, never prompts, and reads everything again in this process alone:
    *("no_sqlite", "skip_dataset_yaml", "non_interactive", "overwrite", "write"),
    *("reindex", "wait", "num_workers", "progress"),
}


def _prepare_file(
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
    _show_samples(path, num_samples, as_json)


def _show_samples(path: AnyPath, num_samples: int, as_json: bool) -> None:
    if as_json:
        echo_json({"path": redact(path), "samples": num_samples})
    elif not is_quiet():
        echo(f"Done. Found {num_samples} samples.")  # scripts look for it


@click.command("index")
@click.argument("path", type=ADDRESS)
@click.option("--no-sqlite", is_flag=True, help="Do not write index.sqlite.")
@json_option
@options_object(IndexingOptions, name="indexing")
@allow_option
@click.pass_context
def reindex_command(
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
        _prepare_file(context, path, upkeep, as_json=as_json, progress=indexing.progress)
        return
    with explaining(path), local_folder(path, indexing) as (folder, left), left.open() as how:
        info = reindex_dataset(folder, replace(how, sqlite=not no_sqlite))
    show_size(info, path, as_json=as_json)


SHOWN_FAILURES = 5


def _report_json(report: MediaReport) -> dict[str, Any]:
    """Return the result of a run as plain data."""
    return {
        "files": report.stored,
        "looked_at": report.looked_at,
        "failed": [{"file": name, "reason": reason} for name, reason in report.failed],
    }


def _show_failures(report: MediaReport) -> None:
    """Print which files have no metadata, and why."""
    for name, reason in report.failed[:SHOWN_FAILURES]:
        echo(f"  skipped {name}: {reason}", err=True)
    if len(report.failed) > SHOWN_FAILURES:
        more = counted(len(report.failed) - SHOWN_FAILURES, "more damaged file")
        echo(f"  and {more}; `energon lint` lists them", err=True)


@click.command("prepare-media")
@click.argument("path", type=ADDRESS)
@options_object(MediaOptions, name="media")
@click.option(
    "--wait", is_flag=True, help="Wait for another process that is preparing the dataset."
)
@click.option("--tmp-path", type=click.Path(path_type=Path), hidden=True)
@json_option
@options_object(ReadingOptions, name="reading")
@allow_option
def media_command(
    path: AnyPath,
    media: MediaOptions,
    wait: bool,
    tmp_path: Path | None,
    as_json: bool,
    reading: ReadingOptions,
) -> None:
    """Record the sizes and durations of media files, for file stores to look up.

    PATH is a prepared dataset, or a folder of files that samples refer to, local or in an object
    store. Reads only the headers of files, in new and changed shards. Run the command again after
    an interruption to continue.

    \b
    Example:
      energon prepare-media ./videos --media-metadata-by-extension
    """
    media_filter = media.filter()
    if media_filter is None:
        raise ConfigError(
            "choose the media files with --media-metadata-by-extension, "
            "--media-metadata-by-header or --media-metadata-by-glob"
        )
    report = _record_media(path, media_filter, reading, wait=wait)
    if as_json:
        echo_json({"path": redact(path), **_report_json(report)})
    else:
        _show_failures(report)
        echo(f"Done. Stored metadata for {report.stored} files.")
