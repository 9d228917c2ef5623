"""`energon pack`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon.cli.address import ADDRESS
from energon.cli.field_map import parse_field_map
from energon.cli.indexing_options import show_size
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import AnyPath, any_path

if TYPE_CHECKING:
    from energon.formats.info import DatasetInfo

MAX_SHOWN = 10


@click.command("pack")
@click.argument("source", metavar="SOURCE")
@click.argument("target", type=ADDRESS)
@click.option(
    "--kind",
    type=click.Choice(["folder", "table", "shards", "huggingface", "mds", "litdata"]),
    help="What SOURCE is; found out by itself.",
)
@click.option("--file-column", metavar="COLUMN", multiple=True, help="Column with paths of files.")
@click.option(
    "--part", metavar="COLUMN:PART", multiple=True, help="Make a column a part of this name."
)
@click.option("--leave-out", metavar="COLUMN", multiple=True, help="Column that is not wanted.")
@click.option("--key-column", metavar="COLUMN", help="Column with keys; else rows are numbered.")
@click.option("--root", type=ADDRESS, help="What paths in columns are relative to.")
@click.option("--skip-missing", is_flag=True, help="Leave out rows whose files are missing.")
@click.option("--prefix-keys", is_flag=True, help="Begin keys with the name of their old shard.")
@click.option("--maxcount", default=100_000, show_default=True, help="Most samples of a shard.")
@click.option("--maxsize", default=3_000_000_000, show_default=True, help="Most bytes of a shard.")
@click.option("--split-ratio", metavar="RATIO", help="Splits by ratio; else all is train.")
@click.option("--sample-type", metavar="CLASS", default="CrudeWebdataset", show_default=True)
@click.option("--field-map", metavar="JSON", help='From fields to parts: {"image": "jpg,png"}.')
@click.option("--overwrite", is_flag=True, help="Delete the shards that TARGET has.")
@click.option("--no-checksum", is_flag=True, help="Keep no checksums of contents.")
@click.option("--no-sqlite", is_flag=True, help="No index.sqlite; `energon index` makes it later.")
@click.option("--wait", is_flag=True, help="Wait for another process that packs to TARGET.")
@click.option("--progress/--no-progress", default=True, help="Show how far it is.")
def command(
    source: str,
    target: AnyPath,
    kind: Any,
    file_column: tuple[str, ...],
    part: tuple[str, ...],
    leave_out: tuple[str, ...],
    key_column: str | None,
    root: AnyPath | None,
    skip_missing: bool,
    prefix_keys: bool,
    maxcount: int,
    maxsize: int,
    split_ratio: str | None,
    sample_type: str,
    field_map: str | None,
    overwrite: bool,
    no_checksum: bool,
    no_sqlite: bool,
    wait: bool,
    progress: bool,
) -> None:
    """Make SOURCE a prepared dataset in the folder TARGET. Both may be URLs.

    SOURCE is a folder of files, of which those with equal names up to the first dot are a
    sample; a table (CSV, TSV, JSON, Parquet), whose rows are samples; a folder of tar
    archives, compressed ones too; a dataset of Hugging Face datasets (a folder that
    save_to_disk wrote, or hf://NAME), of MosaicML Streaming or of LitData.

    Columns of tables become fields of a part `json`. Those with pictures, other bytes or arrays
    become parts of their own, and with --file-column the files that they name.

    If TARGET is a URL, each shard is uploaded as soon as it is complete, and takes space on this
    machine until then.

    A run that was interrupted is taken up where it was when the same command is given again.

    \b
    Example:
      energon pack ./photos ./photos_packed
      energon pack ./captions.csv ./coco --file-column image --part caption:txt
      energon pack ./old_shards ./new_shards --maxcount 10000
      energon pack s3://bucket/photos s3://bucket/photos_packed
    """
    from energon.prepare.dataset import Indexing
    from energon.prepare.pack import ShardSizes, pack_dataset
    from energon.prepare.packing.detect import detect_kind, open_source
    from energon.prepare.packing.row import RowRules
    from energon.prepare.splits import parse_ratio

    kind = kind or detect_kind(source)
    rules = RowRules(
        key_column=key_column,
        file_columns=file_column,
        parts=_parse_parts(part),
        leave_out=leave_out,
        root=root or _folder_of(source, kind),
        skip_missing=skip_missing,
    )
    opened = open_source(source, kind, rules, prefix_keys=prefix_keys)
    about = {"source": redact(source), "kind": kind, "rules": rules.__dict__, "prefix": prefix_keys}
    pack: Callable[..., DatasetInfo] = pack_dataset
    if not isinstance(target, Path):
        from energon.prepare.pack_remote import pack_remote as pack
    with _counting(progress) as advance:
        info = pack(
            opened,
            target if isinstance(target, Path) else target.url,
            about=about,
            sizes=ShardSizes(maxcount, maxsize),
            overwrite=overwrite,
            checksum=not no_checksum,
            progress=advance,
            split_ratio=parse_ratio(split_ratio) if split_ratio else None,
            sample_type=sample_type,
            field_map=parse_field_map(field_map),
            indexing=Indexing(sqlite=not no_sqlite, wait=wait),
        )
    left_out = opened.skipped()
    for reason in left_out[:MAX_SHOWN]:
        click.echo(f"left out: {reason}", err=True)
    if len(left_out) > MAX_SHOWN:
        click.echo(f"left out: {len(left_out)} in all", err=True)
    show_size(info)


def _folder_of(source: str, kind: str) -> AnyPath:
    """Return what paths in a table are relative to; of other sources nothing is."""
    return any_path(source).parent if kind == "table" else Path()


def _parse_parts(entries: tuple[str, ...]) -> dict[str, str]:
    parts = {}
    for entry in entries:
        column, colon, part = entry.rpartition(":")
        if not (column and colon and part):
            raise ConfigError(f"--part {entry}: wanted is COLUMN:PART, e.g. caption:txt")
        parts[column] = part
    return parts


@contextmanager
def _counting(wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show on standard error how many samples are written, if anybody looks."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda samples: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} samples"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda samples: bar.update(task, completed=samples)
