"""`energon prepare-media`, and the options that select files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon.cli.command_group import echo, echo_json
from energon.cli.options import (
    ADDRESS,
    ReadingOptions,
    allow_option,
    option,
    options_object,
)
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath
from energon.messages import counted

if TYPE_CHECKING:
    from energon.prepare.media import MediaFilter, MediaReport


SHOWN_FAILURES = 5


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

        given = {
            "EXTENSION": self.by_extension,
            "HEADER": self.by_header,
            "GLOB": self.by_glob is not None,
        }
        chosen: list[Any] = [strategy for strategy, is_chosen in given.items() if is_chosen]
        if len(chosen) > 1:
            raise ConfigError(
                "--media-metadata-by-extension, -by-header and -by-glob cannot be combined"
            )
        return MediaFilter(chosen[0], self.by_glob) if chosen else None


def report_json(report: MediaReport) -> dict[str, Any]:
    """Return the result of a run as plain data."""
    return {
        "files": report.stored,
        "looked_at": report.looked_at,
        "failed": [{"file": name, "reason": reason} for name, reason in report.failed],
    }


def show_media_report(report: MediaReport) -> None:
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
@options_object(MediaOptions, name="media")
@click.option(
    "--wait", is_flag=True, help="Wait for another process that is preparing the dataset."
)
@click.option("--tmp-path", type=click.Path(path_type=Path), hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options_object(ReadingOptions, name="reading")
@allow_option
def command(
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
    from energon.prepare.media import prepare_media, prepare_remote_media

    chosen = media.filter()
    if chosen is None:
        raise ConfigError(
            "choose the media files with --media-metadata-by-extension, "
            "--media-metadata-by-header or --media-metadata-by-glob"
        )
    with reading.open("reading headers of media") as how:
        if isinstance(path, EPath):
            report = prepare_remote_media(
                path.url, chosen, num_workers=reading.num_workers, progress=how.progress
            )
        else:
            report = prepare_media(
                path, chosen, engine=how.engine, wait=wait, progress=how.progress
            )
    if as_json:
        echo_json({"path": redact(path), **report_json(report)})
    else:
        show_failures(report)
        echo(f"Done. Stored metadata for {report.stored} files.")
