"""The options that say which files are looked at for media metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from energon.cli.verbosity import echo
from energon.errors import ConfigError
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
        help="Note sizes and durations of files whose names end like images, audio or video.",
    ),
    click.option(
        "--media-metadata-by-header",
        "by_header",
        is_flag=True,
        help="The same for files whose first bytes are those of images, audio or video.",
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
    """Add the options to a command; `media_filter` takes what they say."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def media_filter(by_extension: bool, by_header: bool, by_glob: str | None) -> MediaFilter | None:
    """Return which files are to be looked at; None if no option says so.

    Raises:
        ConfigError: If more than one does.
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
            "--media-metadata-by-extension, -by-header and -by-glob exclude one another"
        )
    return MediaFilter(chosen[0], by_glob) if chosen else None


def report_json(report: MediaReport) -> dict[str, Any]:
    """Return what a run has done as plain data."""
    return {
        "files": report.stored,
        "looked_at": report.looked_at,
        "failed": [{"file": name, "reason": reason} for name, reason in report.failed],
    }


def show_report(report: MediaReport) -> None:
    """Say how many files have metadata now, and which failed."""
    echo(f"media metadata of {counted(report.stored, 'file')}", err=True)
    show_failures(report)


def show_failures(report: MediaReport) -> None:
    """Say which files have no metadata, and why."""
    for name, reason in report.failed[:SHOWN_FAILURES]:
        echo(f"  left out {name}: {reason}", err=True)
    if len(report.failed) > SHOWN_FAILURES:
        rest = counted(len(report.failed) - SHOWN_FAILURES, "more damaged file")
        echo(f"  and {rest}; `energon lint` lists them", err=True)
