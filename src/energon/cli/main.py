"""The command `energon`."""

from __future__ import annotations

import sys
from typing import Any

import click

from energon.cli.command_group import (
    InterruptedCommandError,
    LazyGroup,
    add_verbosity,
    failed_command,
    failed_output,
    redacted,
)
from energon.errors import EnergonError
from energon.local_file import working_folder
from energon.version import __version__

COMMANDS = {
    "analyze-debug": "Count how often debug logs contain each sample.",
    "checkpoint": "Inspect saved loader states, and redistribute them to other ranks.",
    "demo": "Write two small datasets, and a program that reads them.",
    "doctor": "Measure what limits loading on this machine.",
    "index": "Bring the index of a prepared dataset up to date.",
    "info": "Show what a dataset contains.",
    "lint": "Decode samples, and report those that fail.",
    "measure": "Store a number for each sample, such as its tokens.",
    "mount": "Mount a dataset as a folder of files.",
    "pack": "Turn files, tables or other datasets into a dataset.",
    "plan": "Show what a training run will read, and when.",
    "prepare": "Index a folder of tar shards and describe it.",
    "prepare-media": "Record the sizes and durations of media files.",
    "preview": "Show samples as hooks receive them.",
    "repair": "Repair a damaged or outdated index.",
    "tar": "Create, join, split, transform and index plain tar files.",
    "verify": "Check a dataset: sizes, offsets, checksums.",
    "view": "Browse a dataset: a gallery, and every part of every sample.",
}


_ARGUMENTS = "energon.arguments"


class _Main(LazyGroup):
    """Shows errors of ours and of the system as messages, and reports an interruption."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        given = tuple(args)
        try:
            context = super().make_context(info_name, args, *more, **extra)
            context.meta[_ARGUMENTS] = given
            return context
        except click.ClickException as error:
            raise redacted(error, given) from None
        except OSError as error:  # while printing help or the version
            raise failed_output(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            working_folder()  # says that it was deleted
            return super().invoke(ctx)
        except click.ClickException as error:
            raise redacted(error, ctx.meta[_ARGUMENTS]) from error.__cause__
        except BrokenPipeError as error:
            raise failed_output(error) from error
        except (EnergonError, OSError) as error:
            raise failed_command(error) from error
        except KeyboardInterrupt as error:
            raise InterruptedCommandError(ctx.invoked_subcommand) from error


@click.group(
    cls=_Main,
    summaries=COMMANDS,
    homes={name: f"energon.cli.{name.replace('-', '_')}:command" for name in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, "-V", "--version", prog_name="energon")
def main() -> None:
    """Prepare, inspect and maintain training datasets.

    \b
    Example:
      energon prepare ./my_dataset --split-ratio 8,1,1 --sample-type CrudeWebdataset
      energon info ./my_dataset
    """


add_verbosity(main)

if __name__ == "__main__":
    sys.exit(main())
