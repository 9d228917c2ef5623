"""`energon tar`: commands for plain tar files, here or elsewhere."""

from __future__ import annotations

import click

from energon.cli.command_group import LazyGroup

COMMANDS = {
    "cat": "Join shards: shuffled, sliced, with other fields or keys.",
    "create": "Create a tar file from a recipe or a folder.",
    "index": "Write the index of shards: how many samples, and where.",
    "ls": "List the samples of shards.",
    "proc": "Transform every sample with a command or a function.",
    "sort": "Sort samples by key, by a field, or at random.",
    "split": "Split shards by number of samples or bytes.",
    "stat": "Count samples, fields and bytes.",
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
    summaries=COMMANDS,
    homes={
        name: f"energon.cli.tar_commands.{file}:{name}_command"
        for file, names in _FILES.items()
        for name in names
    },
)
def command() -> None:
    """Work with plain tar files of samples, on this machine or in object stores.

    Inputs are paths, addresses, patterns with {000..127} or *, folders, @LIST for a file with
    one of these to a line, and - for standard input. Outputs are paths, addresses, and - for
    standard output; with a number in them, like x-%06d.tar, as many shards as are needed.

    \b
    Example:
      energon tar create photos/ -o photos.tar
      energon tar cat 's3://bucket/train-{000..127}.tar' --shuffle 10000 -o mixed-%06d.tar
      energon tar verify mixed-*.tar
    """
