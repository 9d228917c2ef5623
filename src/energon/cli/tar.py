"""`energon tar`: commands for plain tar files, each imported when it runs."""

from __future__ import annotations

import click

from energon.cli.main import LazyGroup

TAR_COMMANDS = {
    "cat": "Join shards, and select, shuffle or rename their samples.",
    "create": "Create a tar file from a recipe or a folder.",
    "index": "Write an index next to each shard.",
    "ls": "List the samples of shards.",
    "proc": "Transform every sample with a command or a function.",
    "split": "Split shards by number of samples or bytes.",
}


@click.group(
    "tar",
    cls=LazyGroup,
    summaries=TAR_COMMANDS,
    homes={name: f"energon.cli.tar_commands:{name}_command" for name in TAR_COMMANDS},
)
def command() -> None:
    """Work with plain tar files of samples, local or in object stores.

    Inputs are paths, addresses, patterns with {000..127} or *, folders, @LIST for a file with one
    of these per line, and - for standard input. Outputs are paths, addresses, and - for standard
    output; x-%06d.tar is split into as many shards as needed.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar cat 's3://bucket/train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar
      energon tar ls mixed-000000.tar
    """
