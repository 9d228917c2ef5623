"""The command `energon`: its commands, imported when they run, what they print, and exit codes."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from traceback import walk_tb
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from energon.errors import ConfigError, EnergonError
from energon.local_file import working_folder
from energon.messages import escape_line, escape_text, nearest, redact_text
from energon.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def write_output(text: str, *, err: bool = False, color: bool | None = None) -> None:
    """Print text as it is.

    Raises:
        ClosedOutputError: If the reader has closed the pipe.
        RefusedCommandError: If it cannot be written for another reason.
    """
    try:
        click.echo(text, err=err, color=color)
    except OSError as error:
        raise failed_output(error) from error


def echo(line: str, *, err: bool = False) -> None:
    """Print one line, escaping anything that would start another line or control the terminal."""
    write_output(escape_line(line), err=err)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines, each as `echo` does."""
    for line in lines:
        echo(line, err=err)


def echo_json(result: Any) -> None:
    """Print plain data as JSON, whose escapes make names safe."""
    write_output(json.dumps(result, indent=2))


_KEY = "energon.verbosity"
_VERBOSITY = {
    "quiet": "Print only results, warnings and errors.",
    "verbose": "Show all log messages.",
}


class CompletedByShell:
    """A type of parameters whose values shells complete as paths."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave the completion to the shell, which knows the files."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class PathText(CompletedByShell, click.types.StringParamType):
    """A path, a URL or a pattern, as text."""


_PATH_TEXT = PathText()
_METAVARS_OF_PATHS = frozenset({"FILE", "FOLDER", "OUTPUT", "PLACE"})


def add_common(command: click.Command) -> click.Command:
    """Add --quiet and --verbose to a command, and let shells complete its paths.

    The commands of a group get the same.
    """
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_common(each)
    for param in command.params:
        is_path = isinstance(param, click.Argument) or param.metavar in _METAVARS_OF_PATHS
        if is_path and param.type is click.STRING:
            param.type = _PATH_TEXT
    flags = {flag for each in command.params for flag in each.opts}
    for name, text in _VERBOSITY.items() if "--quiet" not in flags else ():
        short = {f"-{name[0]}"} - flags
        flag = partial(click.Option, is_flag=True, expose_value=False, callback=_set_level)
        command.params.append(flag([*short, f"--{name}"], help=text))
    return command


def is_quiet() -> bool:
    """Return whether the running command was told to be quiet."""
    return _level() == "quiet"


def is_verbose() -> bool:
    """Return whether the running command shows all log messages."""
    return _level() == "verbose"


def _level() -> str | None:
    context = click.get_current_context(silent=True)
    return None if context is None else str(context.meta.get(_KEY))


def _set_level(context: click.Context, option: click.Parameter, is_set: bool) -> None:
    """Set the level, once for the whole command line: groups and their commands share it."""
    level, before = option.name, context.meta.get(_KEY)
    if not is_set or before == level:
        return
    if before is not None:
        raise click.UsageError("choose one of --quiet and --verbose")
    context.meta[_KEY] = level
    if level == "verbose":
        layout = "%(levelname)s %(name)s: %(message)s"
        # Click closes the outermost context alone if parsing ends with an error.
        context.find_root().with_resource(logging_at(logging.DEBUG, layout))


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to `sys.stderr`, which progress bars replace to print above themselves."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Keep none."""


@contextmanager
def logging_at(level: int, layout: str) -> Iterator[None]:
    """Show log messages on standard error, from a level on."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(layout))
    handler.setLevel(level)
    logger = logging.getLogger("energon")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before, level) if before else level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


GO_ON = frozenset({"index", "pack", "prepare", "prepare-media", "repair"})
"""Commands that continue what an interrupted run left behind."""


class RefusedCommandError(click.ClickException):
    """What a command was asked for is invalid or missing, or cannot be read or written."""

    exit_code = 2


def failed_command(error: EnergonError | OSError) -> click.ClickException:
    """Return the exception with which click reports an error of ours or of the system."""
    if not isinstance(error, EnergonError):
        # Only click itself, when it prints a help, passes such errors on, see `write_output`.
        if any(frame.f_code is click.echo.__code__ for frame, _ in walk_tb(error.__traceback__)):
            return failed_output(error)
        # Here, so that commands start without it.
        from energon.io.address import redact
        from energon.io.atomic import remedy_if_full

        file = "" if error.filename is None else f"{redact(error.filename)}: "
        remedy = remedy_if_full(error)
        hint = f"; {remedy} and run the command again" if remedy else ""
        return RefusedCommandError(escape_text(f"{file}{error.strerror or error}{hint}"))
    # What the system or a store refuses says nothing about the data.
    refused = any(isinstance(each, (ConfigError, OSError)) for each in (error, error.__cause__))
    return (RefusedCommandError if refused else click.ClickException)(str(error))


def redacted(error: click.ClickException, arguments: Sequence[str]) -> click.ClickException:
    """Return an error of click itself, which repeats arguments, without passwords of addresses."""
    message = error.message
    for argument in arguments:
        shown = redact_text(argument, is_address=True)
        if shown != argument:
            message = message.replace(argument, shown)
    vars(error).update(message=redact_text(message))
    return error


def failed_output(error: OSError) -> click.ClickException:
    """Return the exception with which click reports that output cannot be written."""
    # Python flushes standard output once more at its end, and would exit with 120.
    with suppress(OSError):  # in memory, where tests read the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return ClosedOutputError()
    return RefusedCommandError(f"cannot write the output: {error.strerror}")


class ClosedOutputError(click.ClickException):
    """The reader of the output has closed it, as `head` does: the rest is not printed."""

    exit_code = 141
    """The exit code that shells use for SIGPIPE."""

    def __init__(self) -> None:
        super().__init__("the reader of the output has closed it")

    def show(self, file: IO[Any] | None = None) -> None:
        """Print nothing."""


class InterruptedCommandError(click.ClickException):
    """The user has pressed Ctrl-C.

    Args:
        command: The command that was running.
    """

    exit_code = 130
    """The exit code that shells use for SIGINT."""

    def __init__(self, command: str | None) -> None:
        super().__init__(
            "interrupted; completed work is kept, and the same command continues from there"
            if command in GO_ON
            else "interrupted; no incomplete files were left"
        )

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message; it is not an error."""
        click.echo(f"\n{self.format_message()}", file=file, err=file is None)


class GroupedCommand(click.Command):
    """A command with many options, which its help shows in groups.

    Args:
        groups: The parameters of each group, by its title; all others are "Options".
        settings: The arguments of `click.Command`.
    """

    def __init__(
        self, name: str | None, *, groups: Mapping[str, Sequence[str]], **settings: Any
    ) -> None:
        super().__init__(name, **settings)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {name: title for title, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.groups, "Options")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows[titles.get(str(param.name), "Options")].append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


class LazyGroup(click.Group):
    """Knows the names of its commands, and imports one only to run it or show its help.

    Args:
        summaries: What each command does, in one sentence, by its name.
        homes: Where each command is, as `module:name`.
        settings: The arguments of `click.Group`.
    """

    def __init__(
        self, *, summaries: Mapping[str, str], homes: Mapping[str, str], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._summaries = summaries
        self._homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._summaries:
            return None
        home, _, attribute = self._homes[cmd_name].partition(":")
        command: click.Command = getattr(import_module(home), attribute)
        return add_common(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not (name in self._summaries or name.startswith("-") or ctx.resilient_parsing):
            close = nearest(name, self._summaries)
            hint = f" Did you mean {close!r}?" if close else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(self._summaries.items()))


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
_HOMES = {
    "index": "energon.cli.prepare:reindex_command",
    "prepare-media": "energon.cli.prepare:media_command",
    "repair": "energon.cli.verify:repair_command",
}
"""The commands that share the module of another one."""

_ARGUMENTS = "energon.arguments"


class _Main(LazyGroup):
    """Shows errors of ours and of the system as messages, and reports an interruption."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **extra: Any
    ) -> click.Context:
        arguments = tuple(args)
        # Neither commands nor libraries expect that one of these is closed.
        sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        try:
            context = super().make_context(info_name, args, *more, **extra)
            context.meta[_ARGUMENTS] = arguments
            return context
        except click.ClickException as error:
            raise redacted(error, arguments) from None
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
    homes={name: f"energon.cli.{name.replace('-', '_')}:command" for name in COMMANDS} | _HOMES,
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


add_common(main)

if __name__ == "__main__":
    sys.exit(main())
