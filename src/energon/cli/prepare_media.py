"""`energon prepare-media`, and the options that select files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from energon.cli.command_group import echo, echo_json
from energon.cli.options import ADDRESS, allow_option, open_indexing, reading_options
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath
from energon.messages import counted

if TYPE_CHECKING:
    from energon.formats.tables.media_table import Strategy
    from energon.prepare.media.prepare import MediaReport
    from energon.prepare.media.probe import MediaFilter

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--media-metadata-by-extension",
        "by_extension",
        is_flag=True,
        help="Record sizes and durations of files with extensions of images, audio or video.",
    ),
    click.option(
        "--media-metadata-by-header",
        "by_header",
        is_flag=True,
        help="The same for files whose content is detected as images, audio or video.",
    ),
    click.option(
        "--media-metadata-by-glob",
        "by_glob",
        metavar="PATTERNS",
        help='The same for files whose names match, as in "*.left.jpg,*.mp4".',
    ),
)
SHOWN_FAILURES = 5


def media_options(command: Command) -> Command:
    """Add the options to a command; pass them to `media_filter`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def media_filter(by_extension: bool, by_header: bool, by_glob: str | None) -> MediaFilter | None:
    """Return which files to check; None if no option says so.

    Raises:
        ConfigError: If more than one option does.
    """
    from energon.prepare.media.probe import MediaFilter

    chosen: list[Strategy] = []
    if by_extension:
        chosen.append("EXTENSION")
    if by_header:
        chosen.append("HEADER")
    if by_glob is not None:
        chosen.append("GLOB")
    if len(chosen) > 1:
        raise ConfigError(
            "--media-metadata-by-extension, -by-header and -by-glob cannot be combined"
        )
    return MediaFilter(chosen[0], by_glob) if chosen else None


def report_json(report: MediaReport) -> dict[str, Any]:
    """Return the result of a run as plain data."""
    return {
        "files": report.stored,
        "looked_at": report.looked_at,
        "failed": [{"file": name, "reason": reason} for name, reason in report.failed],
    }


def show_report(report: MediaReport) -> None:
    """Print how many files have metadata now, and which failed."""
    echo(f"media metadata of {counted(report.stored, 'file')}", err=True)
    show_failures(report)


def show_failures(report: MediaReport) -> None:
    """Print which files have no metadata, and why."""
    for name, reason in report.failed[:SHOWN_FAILURES]:
        echo(f"  skipped {name}: {reason}", err=True)
    if len(report.failed) > SHOWN_FAILURES:
        rest = counted(len(report.failed) - SHOWN_FAILURES, "more damaged file")
        echo(f"  and {rest}; `energon lint` lists them", err=True)


@click.command("prepare-media")
@click.argument("path", type=ADDRESS)
@media_options
@click.option(
    "--wait", is_flag=True, help="Wait for another process that is preparing the dataset."
)
@click.option("--tmp-path", type=click.Path(path_type=Path), hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@reading_options
@allow_option
def command(
    path: AnyPath,
    by_extension: bool,
    by_header: bool,
    by_glob: str | None,
    wait: bool,
    tmp_path: Path | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Record the sizes and durations of media files, for file stores to look up.

    PATH is a prepared dataset, here or in an object store, or any folder of files that samples
    refer to. Files are not decoded; only their headers are read. Shards (and files of a folder)
    that have not changed since the last time are not read again, and an interrupted run
    continues where it stopped.

    \b
    Example:
      energon prepare-media ./videos --media-metadata-by-extension
    """
    from energon.prepare.media.prepare import prepare_media, prepare_remote_media

    chosen = media_filter(by_extension, by_header, by_glob)
    if chosen is None:
        raise ConfigError(
            "choose the media files with --media-metadata-by-extension, "
            "--media-metadata-by-header or --media-metadata-by-glob"
        )
    with open_indexing(doing="reading headers of media", wait=wait, **reading) as how:
        if isinstance(path, EPath):
            report = prepare_remote_media(
                path.url, chosen, num_workers=how.engine.num_workers, progress=how.progress
            )
        else:
            report = prepare_media(
                path, chosen, engine=how.engine, wait=how.wait, progress=how.progress
            )
    if as_json:
        echo_json({"path": redact(path), **report_json(report)})
    else:
        show_failures(report)
        echo(f"Done. Stored metadata for {report.stored} files.")
