"""`energon prepare-media`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from energon.cli.address import ADDRESS
from energon.cli.indexing_options import open_indexing, reading_options
from energon.cli.media_options import media_filter, media_options, report_json, show_failures
from energon.cli.options import allow_option
from energon.cli.verbosity import echo, echo_json
from energon.errors import ConfigError
from energon.io.address import redact
from energon.io.epath import AnyPath, EPath


@click.command("prepare-media")
@click.argument("path", type=ADDRESS)
@media_options
@click.option("--wait", is_flag=True, help="Wait for another process that prepares the dataset.")
@click.option("--tmp-path", type=click.Path(path_type=Path), hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
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
    """Note sizes and durations of media files, for file stores to look up.

    PATH is a prepared dataset, here or in an object store, or any folder of files that samples
    name. Files are not decoded; only their headers are read. Shards (and files of a folder) that
    have not changed since the last time are not looked at again, and a run that was interrupted
    goes on.

    \b
    Example:
      energon prepare-media ./videos --media-metadata-by-extension
    """
    from energon.prepare.media.prepare import prepare_media, prepare_remote_media

    chosen = media_filter(by_extension, by_header, by_glob)
    if chosen is None:
        raise ConfigError(
            "say which files are media files: --media-metadata-by-extension, -by-header or -by-glob"
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
