"""`energon pack`."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon.cli.main import GroupedCommand, echo, echo_json, is_quiet
from energon.cli.options import (
    ADDRESS,
    EngineOptions,
    allow_option,
    is_given,
    logging_to_terminal,
    option,
    options_object,
    parse_field_map,
    progress_bar,
    refuse_options,
    show_size,
)
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import AnyPath
from energon.messages import counted, shell_word

if TYPE_CHECKING:
    from energon.prepare.importers.row import PackSource, RowRules
    from energon.prepare.writers.pack import PackOptions
    from energon.prepare.writers.tokens import TokenizeOptions

MAX_SHOWN_FAILURES = 10
_ORDER = re.compile(r"shuffle(?:[:(](?P<seed>\d+)\)?)?")

_OF_ROWS = {"file_columns", "parts", "leave_out", "key_column", "root", "skip_missing"}
_WITHOUT = {"folder": {*_OF_ROWS, "prefix_keys"}, "shards": _OF_ROWS}
"""Options that do not apply to a kind of source."""
_NOUNS = {"folder": "a folder of files", "shards": "tar archives"}


@dataclass(frozen=True)
class PackChoices:
    """The options of the command, see its help."""

    kind: str | None = option(
        metavar="KIND",
        help="Override the detected kind: folder, table, imagefolder, shards, huggingface, "
        "or a kind that a package adds, such as mds.",
    )
    as_files: bool = option(is_flag=True, help="Make each file a separate sample.")
    label_from: str | None = option(
        type=click.Choice(["folder"]),
        help="Add the fields label and label_name, taken from folder names.",
    )
    file_columns: tuple[str, ...] = option(
        "--file-column",
        metavar="COLUMN",
        multiple=True,
        help="Column with paths of files; detected if the files exist.",
    )
    parts: tuple[str, ...] = option(
        "--part",
        metavar="COLUMN:PART",
        multiple=True,
        help="Store a column as a part with this name.",
    )
    leave_out: tuple[str, ...] = option(metavar="COLUMN", multiple=True, help="Drop a column.")
    key_column: str | None = option(
        metavar="COLUMN", help="Column with keys; without it, rows are numbered."
    )
    root: AnyPath | None = option(
        type=ADDRESS,
        metavar="FOLDER",
        help="Folder of relative paths in columns.",
        show_default="that of the table, or one next to it",
    )
    skip_missing: bool = option(
        is_flag=True, help="Skip rows whose files are missing, or whose values are all null."
    )
    prefix_keys: bool = option(
        is_flag=True, help="Prefix keys with the name of their original shard."
    )
    maxcount: int = option(
        type=click.IntRange(1),
        default=100_000,
        show_default=True,
        help="Maximum number of samples in a shard.",
    )
    maxsize: int = option(
        type=click.IntRange(1),
        default=3_000_000_000,
        show_default=True,
        help="Maximum size of a shard in bytes.",
    )
    split_ratio: str | None = option(
        metavar="RATIO",
        help="Divide samples by ratio: 8,1,1 or train:9,holdout:1.",
        show_default="the splits of SOURCE, or train",
    )
    stratify: str | None = option(
        metavar="COLUMN",
        help="Divide each value of a column, or each folder (--stratify folder), by --split-ratio.",
    )
    order: str = option(
        metavar="ORDER",
        default="as-is",
        show_default=True,
        help="Order of samples in the shards: as-is, shuffle or shuffle:SEED.",
    )
    sample_type: str = option(
        metavar="CLASS",
        default="CrudeWebdataset",
        show_default=True,
        help="Type of the samples, such as CaptioningSample.",
    )
    field_map: str | None = option(
        metavar="JSON", help='The parts of each field: {"image": "jpg,png"}.'
    )
    overwrite: bool = option(is_flag=True, help="Delete existing shards in TARGET.")
    no_checksum: bool = option(is_flag=True, help="Do not store checksums of contents.")
    no_sqlite: bool = option(
        is_flag=True, help="Do not write index.sqlite; `energon index` can do so later."
    )
    wait: bool = option(is_flag=True, help="Wait for another process that is packing to TARGET.")
    progress: bool = option("--progress/--no-progress", default=True, help="Show a progress bar.")
    as_json: bool = option("--json", is_flag=True, help="Print the result as JSON.")
    to: str = option(
        type=click.Choice(["shards", "tokens"]),
        default="shards",
        show_default=True,
        help="Write shards, or token files (.bin, .idx) from .jsonl and .parquet files.",
    )

    def rules(self) -> RowRules:
        """Return how rows become samples."""
        from energon.prepare.importers.row import RowRules

        return RowRules(
            key_column=self.key_column,
            file_columns=self.file_columns,
            parts=_parse_parts(self.parts),
            leave_out=self.leave_out,
            root=self.root,
            skip_missing=self.skip_missing,
        )

    def packing(self) -> PackOptions:
        """Return how samples become shards, and shards a dataset."""
        from energon.prepare.splits import parse_ratio
        from energon.prepare.writers.pack import PackOptions

        return PackOptions(
            maxcount=self.maxcount,
            maxsize=self.maxsize,
            split_ratio=parse_ratio(self.split_ratio) if self.split_ratio else None,
            stratify=self.stratify,
            shuffle_seed=_parse_order(self.order),
            overwrite=self.overwrite,
            checksum=not self.no_checksum,
            sample_type=self.sample_type,
            field_map=parse_field_map(self.field_map),
        )


@dataclass(frozen=True)
class TokenizingOptions:
    """The options that apply to token files only, see the help of the command."""

    tokenizer: str | None = option(
        metavar="MODULE:FUNCTION", help="The function that converts a text to tokens."
    )
    text_column: str = option(
        metavar="COLUMN", default="text", show_default=True, help="The column with the texts."
    )
    end_token: int | None = option(
        type=int, metavar="TOKEN", help="The token that ends each document."
    )
    vocabulary_size: int | None = option(
        type=click.IntRange(1),
        metavar="NUMBER",
        help="Number of different tokens; below 65,500, each takes two bytes.",
    )

    def tokenizing(self) -> TokenizeOptions:
        """Return how texts become tokens."""
        from energon.prepare.writers.tokens import TokenizeOptions

        if self.tokenizer is None:
            raise ConfigError("--to tokens needs a --tokenizer, like my_tokens:encode")
        return TokenizeOptions(
            self.tokenizer, self.text_column, self.end_token, self.vocabulary_size
        )


_OF_TOKENS = {each.name for kind in (TokenizingOptions, EngineOptions) for each in fields(kind)}
_WITH_TOKENS = {*_OF_TOKENS, "to", "overwrite", "progress", "as_json"}


_GROUPS = {
    "Source": ("kind", "as_files", "label_from", "prefix_keys"),
    "Columns of tables": tuple(sorted(_OF_ROWS)),
    "Shards": ("maxcount", "maxsize", "order", "overwrite", "no_checksum", "no_sqlite"),
    "Splits": ("split_ratio", "stratify"),
    "Description of samples": ("sample_type", "field_map"),
    "Token files": ("to", *sorted(_OF_TOKENS)),
}
"""The options in the help of the command."""


@click.command("pack", cls=GroupedCommand, groups=_GROUPS)
@click.argument("sources", metavar="SOURCE...", nargs=-1)
@click.argument("target", type=ADDRESS)
@options_object(PackChoices)
@options_object(TokenizingOptions, name="tokens", only="With --to tokens")
@options_object(EngineOptions, name="engine", only="With --to tokens")
@allow_option
@click.pass_context
def command(
    context: click.Context,
    /,
    sources: tuple[str, ...],
    target: AnyPath,
    options: PackChoices,
    tokens: TokenizingOptions,
    engine: EngineOptions,
) -> None:
    """Turn SOURCE into a prepared dataset in the folder TARGET. Both may be URLs.

    SOURCE is a folder, where files with equal names up to the first dot form a sample; tables
    (CSV, TSV, JSON, Parquet), where each row is a sample; tar archives, compressed or not; a
    Hugging Face dataset (a folder written by save_to_disk, an ImageFolder, or hf://NAME); or a
    kind that a package adds, such as MDS. SOURCE may be a pattern, or several files.

    Columns of tables become fields of a part `json`; columns of images, other bytes, arrays or
    file paths become separate parts.

    If TARGET is a URL, each shard takes disk space here until it is uploaded. Run the same
    command again after an interruption to continue.

    \b
    Example:
      energon pack ./photos ./photos_packed --split-ratio 8,1,1
      energon pack ./captions.csv ./coco --part caption:txt
      energon pack './data/*.parquet' ./packed --order shuffle
      energon pack corpus.jsonl corpus.idx --to tokens --tokenizer my_tokens:encode
      energon pack s3://bucket/old_shards s3://bucket/new_shards --maxcount 10000
    """
    if not sources:
        raise click.UsageError(
            f"expected SOURCE and TARGET, found only {str(target)!r}; name the folder to write, as "
            f"in `energon pack {shell_word(target)} "
            f"{shell_word(str(target).rstrip('/') + '_packed')}`"
        )
    if options.to == "tokens":
        refuse_options(context, "--to tokens writes no shards", _WITH_TOKENS)
        _pack_tokens(sources, target, options, tokens, engine)
        return
    for param in context.command.params:
        if param.name in _OF_TOKENS and is_given(context, param.name):
            raise ConfigError(f"{param.opts[0]} is for --to tokens")
    _pack_shards(context, sources, target, options)


def _pack_shards(
    context: click.Context, sources: Sequence[str], target: AnyPath, options: PackChoices
) -> None:
    from energon.prepare.dataset import Indexing
    from energon.prepare.remote import pack_remote
    from energon.prepare.writers.pack import pack_dataset

    packing = options.packing()
    with logging_to_terminal():  # shows which files are in which split, if names tell that
        source, identity = _open(context, sources, target, options)
        names = source.split_names()
        if names != [""]:
            _note(
                f"splits of the source: {', '.join(names)}"
                if packing.split_ratio is None
                else f"--split-ratio draws new splits, instead of {', '.join(names)} of the source"
            )
    with logging_to_terminal(logging.WARNING):
        indexing = Indexing(sqlite=not options.no_sqlite, wait=options.wait)
        with progress_bar(options.progress, "packing", "samples") as advance:
            pack = (
                partial(pack_dataset, source, target)
                if isinstance(target, Path)
                else partial(pack_remote, source, target.url)
            )
            info = pack(packing, identity=identity, indexing=indexing, progress=advance)
    left_out = source.skipped()
    if options.as_json:
        show_size(info, target, as_json=True, kind=identity["kind"], left_out=left_out)
        return
    for reason in left_out[:MAX_SHOWN_FAILURES]:
        echo(f"skipped: {reason}", err=True)
    if len(left_out) > MAX_SHOWN_FAILURES:
        echo(f"skipped: {len(left_out)} in total", err=True)
    show_size(info, target, as_json=False)


def _pack_tokens(
    sources: Sequence[str],
    target: AnyPath,
    options: PackChoices,
    tokens: TokenizingOptions,
    engine: EngineOptions,
) -> None:
    from energon.prepare.writers.tokens import pack_tokens

    if not isinstance(target, Path):
        raise ConfigError(
            f"{target}: token files are written on this machine; upload them afterwards"
        )
    how = tokens.tokenizing()
    bar = progress_bar(options.progress, "tokenizing", "documents")
    with logging_to_terminal(logging.WARNING), bar as advance:
        written = pack_tokens(
            sources,
            target,
            how,
            engine=engine.make(),
            overwrite=options.overwrite,
            progress=advance,
        )
    if options.as_json:
        echo_json({"path": str(target), **written._asdict()})
    elif not is_quiet():
        documents = counted(written.num_documents, "document")
        echo(f"{documents}, {counted(written.num_tokens, 'token')}", err=True)


def _open(
    context: click.Context, sources: Sequence[str], target: AnyPath, options: PackChoices
) -> tuple[PackSource, dict[str, Any]]:
    """Return the rows to pack, and their identity."""
    from energon.prepare.importers.detect import complete_rules, find_source, open_source

    detected = find_source(
        sources, kind="folder" if options.as_files else options.kind, target=target
    )
    without = _WITHOUT.get(detected.kind, {"prefix_keys"})
    others = {str(each.name) for each in context.command.params} - without
    reason = f"{redact(sources[0])} is packed as {_NOUNS.get(detected.kind, 'rows')}"
    refuse_options(context, reason, others)
    rules, notes = complete_rules(detected, options.rules())
    source = open_source(
        detected,
        rules,
        prefix_keys=options.prefix_keys,
        as_files=options.as_files,
        label_from_folder=options.label_from is not None,
    )
    for note in (*detected.notes, *notes, *source.notes()):
        _note(note)
    if detected.kind == "table" and rules.file_columns and rules.key_column is None:
        _note(
            "samples are numbered; to look them up by the names of their files, as auxiliary data "
            f"are, pass --key-column {shell_word(rules.file_columns[0])}"
        )
    identity = {
        "source": [redact(each) for each in sources],
        "kind": detected.kind,
        "rules": rules.__dict__,
        "prefix": options.prefix_keys,
        "as_files": options.as_files,
    }
    return source, identity


def _note(text: str) -> None:
    if not is_quiet():
        echo(text, err=True)


def _parse_parts(entries: Sequence[str]) -> dict[str, str]:
    parts = {}
    for entry in entries:
        column, colon, part = entry.rpartition(":")
        if not (column and colon and part):
            raise ConfigError(f"--part {entry}: expected COLUMN:PART, e.g. caption:txt")
        parts[column] = part
    return parts


def _parse_order(text: str) -> int | None:
    """Return the seed of an order; None for that of the source."""
    if text == "as-is":
        return None
    match = _ORDER.fullmatch(text)
    if match is None:
        raise ConfigError(f"--order {text}: expected as-is, shuffle, or shuffle:SEED")
    return int(match["seed"] or 0)
