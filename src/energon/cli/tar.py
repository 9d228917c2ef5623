"""`energon tar`: commands for plain tar files, here or elsewhere."""

from __future__ import annotations

import click

from energon.cli.command_group import LazyGroup

TAR_COMMANDS = {
    "cat": "Join shards, and select, shuffle or rename their samples.",
    "create": "Create a tar file from a recipe or a folder.",
    "index": "Write an index next to each shard.",
    "ls": "List the samples of shards.",
    "proc": "Transform every sample with a command or a function.",
    "sort": "Sort samples by key, by a field, or at random.",
    "split": "Split shards by number of samples or bytes.",
    "stat": "Count the samples, fields and bytes of shards.",
    "verify": "Check shards for damage and other problems.",
}

_FILES = {
    "inspect": ("index", "ls", "stat", "verify"),
    "make": ("create", "proc"),
    "rewrite": ("cat", "sort", "split"),
}


@click.group(
    "tar",
    cls=LazyGroup,
    summaries=TAR_COMMANDS,
    homes={
        name: f"energon.cli.tar_commands.{file}:{name}_command"
        for file, names in _FILES.items()
        for name in names
    },
)
def command() -> None:
    """Work with plain tar files of samples, local or in object stores.

    Inputs are paths, addresses, patterns with {000..127} or *, folders, @LIST for a file with one
    of these per line, and - for standard input. Outputs are paths, addresses, and - for standard
    output; an output with a number, like x-%06d.tar, is split into as many shards as needed.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar cat 's3://bucket/train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar
      energon tar verify mixed-*.tar
    """
