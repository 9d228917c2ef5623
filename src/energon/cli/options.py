"""Options and arguments shared by commands: addresses, how shards are indexed, plain tar files."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from energon.arguments import load_named
from energon.cli.main import (
    CompletedByShell,
    echo,
    echo_json,
    is_quiet,
    is_verbose,
    logging_at,
    write_output,
)
from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.address import redact
from energon.io.epath import AnyPath, any_path
from energon.limits import ALLOW_VARIABLE, CAPABILITIES, allowed_by_environment
from energon.messages import counted, shell_word

if TYPE_CHECKING:
    from energon.formats.meta.info import DatasetInfo
    from energon.prepare.dataset import Indexing
    from energon.prepare.engines import Engine, EngineName


def parse_field_map(text: str | None) -> dict[str, str] | None:
    """Return the value of the option; None if it is not given.

    Raises:
        ConfigError: If it is not a JSON object.
    """
    if text is None:
        return None
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f'--field-map {text}: expected JSON, as in --field-map \'{{"image": "jpg"}}\', with '
            f"single quotes around it for the shell ({error})"
        ) from error
    if not isinstance(mapping, dict):
        raise ConfigError(f'--field-map {text}: expected {{"FIELD": "PART"}}')
    return mapping


T = TypeVar("T")

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def _allow(context: click.Context, _: click.Parameter, names: tuple[str, ...]) -> None:
    before = os.environ.get(ALLOW_VARIABLE)

    def restore() -> None:
        if before is None:
            os.environ.pop(ALLOW_VARIABLE, None)
        else:
            os.environ[ALLOW_VARIABLE] = before

    if names:
        os.environ[ALLOW_VARIABLE] = ",".join(sorted({*names, *allowed_by_environment()}))
        context.call_on_close(restore)


allow_option = click.option(
    "--allow",
    metavar="NAME",
    multiple=True,
    type=click.Choice(list(CAPABILITIES)),
    callback=_allow,
    expose_value=False,
    help=f"Allow operations refused otherwise: {', '.join(CAPABILITIES)}; may be repeated.",
)
"""Applies to all that a command does, also in its workers."""


def load_encoder(name: str | None) -> type[Any] | None:
    """Return the class that --task-encoder names; None if it is not given."""
    if name is None:
        return None
    encoder = load_named("--task-encoder", name)
    if not isinstance(encoder, type):
        raise ConfigError(f"--task-encoder {name}: expected MODULE:CLASS")
    return encoder


def option(*flags: str, **settings: Any) -> Any:
    """Return a field of a dataclass that holds the value of an option, see `click.option`.

    Without `flags`, the option is named like the field.
    """
    return field(metadata={"flags": flags, "settings": settings})


def options_object(
    kind: type[Any], *, name: str = "options", only: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command, which receives them as one object.

    Args:
        kind: A dataclass; its fields are made by `option`, in the order of the help.
        name: The parameter of the command.
        only: When the options apply, for their help: "With --to tokens".
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*context: Any, **values: Any) -> Any:
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            return command(*context, **values)

        decorated: Callable[..., Any] = run
        for each in reversed(fields(kind)):
            flags = each.metadata["flags"] or (f"--{each.name.replace('_', '-')}",)
            settings = dict(each.metadata["settings"])
            if only:
                text = settings["help"]
                settings["help"] = f"{only}: {text[0].lower()}{text[1:]}"
            decorated = click.option(*flags, each.name, **settings)(decorated)
        return decorated

    return add


def is_given(context: click.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_options(context: click.Context, reason: str, honoured: Collection[str]) -> None:
    """Refuse options of a command that do not apply to its input.

    Args:
        context: The running command.
        reason: Why, for the message: "x.parquet is a Parquet file".
        honoured: Names of the parameters that apply, or never matter.

    Raises:
        ConfigError: If others were given.
    """
    refused = [
        each.opts[0]
        for each in context.command.params
        if isinstance(each, click.Option)
        and each.expose_value
        and each.name not in honoured
        and is_given(context, str(each.name))
    ]
    if refused:
        verb, it = ("does", "it") if len(refused) == 1 else ("do", "them")
        raise ConfigError(f"{reason}; {' and '.join(refused)} {verb} not apply, omit {it}")


@contextmanager
def explaining(path: AnyPath) -> Iterator[None]:
    """Name the kind of a dataset without shards, in which the block finds no index of shards.

    Raises:
        DatasetNotFoundError: As raised by the block, with advice.
        ConfigError: If it is a dataset without an index of shards.
    """
    from energon.metadataset.kind import dataset_kind, kind_entry

    try:
        yield
    except DatasetNotFoundError as error:
        address = os.fspath(path)
        kind = dataset_kind(address)
        if kind_entry(kind).in_shards:
            raise
        raise ConfigError(
            f"{redact(address)} is a dataset without shards ({kind}), so it has no index of shards "
            f"to maintain; `energon lint {shell_word(redact(address))}` decodes its samples"
        ) from error


class AddressType(CompletedByShell, click.ParamType):  # type: ignore[type-arg]
    """A path of the standard library, or an `EPath` for a URL."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> AnyPath:
        """Return the path that a text stands for."""
        if value == "":
            self.fail("the path is empty; is a variable of the shell not set?", param, ctx)
        return any_path(value)


ADDRESS = AddressType()


@dataclass(frozen=True)
class EngineOptions:
    """Where to run, see the help of the options."""

    num_workers: int = option(
        *("--workers", "--num-workers"),
        type=click.IntRange(1),
        default=16,
        help="Number of processes.",
    )
    engine: EngineName = option(
        type=click.Choice(["local", "dask", "ray"]),
        default="local",
        show_default=True,
        help="Run in processes of this machine, or on a cluster that can access the files.",
    )
    address: str | None = option(
        metavar="ADDRESS",
        help="Scheduler or head of the cluster.",
        show_default="start one on this machine",
    )

    def make(self) -> Engine:
        """Return the engine."""
        from energon.prepare.engines import Engine

        return Engine(self.engine, self.address, self.num_workers)


@dataclass(frozen=True)
class ReadingOptions(EngineOptions):
    """Where shards are read, see the help of the options."""

    progress: bool = option("--progress/--no-progress", default=True, help="Show a progress bar.")

    @contextmanager
    def open(self, doing: str = "indexing shards") -> Iterator[Indexing]:
        """Yield the values as settings, with a progress bar if anyone can see it."""
        from energon.prepare.dataset import Indexing

        with logging_to_terminal(), progress_bar(self.progress, doing) as advance:
            yield Indexing(self.make(), progress=advance)


@dataclass(frozen=True)
class IndexingOptions(ReadingOptions):
    """How shards are indexed, see the help of the options."""

    checksum: bool = option(
        is_flag=True, help="Read all contents, and store or compare their checksums."
    )
    reindex: bool = option(is_flag=True, help="Reread all shards, even unchanged ones.")
    wait: bool = option(
        is_flag=True, help="Wait for another process that is preparing the dataset."
    )

    @contextmanager
    def open(self, doing: str = "indexing shards") -> Iterator[Indexing]:
        """Yield the values as settings, with a progress bar if anyone can see it."""
        with super().open(doing) as how:
            yield replace(how, checksum=self.checksum, force=self.reindex, wait=self.wait)


@contextmanager
def local_folder(
    path: AnyPath, indexing: IndexingOptions, *, exclude: Sequence[str] = ()
) -> Iterator[tuple[Path, IndexingOptions]]:
    """Yield the folder of a dataset, or a local one that stands for a remote one, and how to index.

    Changes in the latter are uploaded at the end, unless there was an error. Its shards are
    already indexed, and have no content.

    Args:
        path: Path or address of the dataset.
        indexing: How to index its shards.
        exclude: Regular expressions; shards whose path matches one of them are excluded.
    """
    if isinstance(path, Path):
        yield path, indexing
        return
    from energon.prepare.index import IndexOptions
    from energon.prepare.remote import mirrored

    with ExitStack() as stack:
        with indexing.open() as how:
            options = IndexOptions(how.checksum, how.force)
            folder = stack.enter_context(
                mirrored(path.url, exclude=exclude, options=options, progress=how.progress)
            )
        yield folder, replace(indexing, reindex=False)  # all shards have just been read


def show_size(info: DatasetInfo, path: AnyPath, *, as_json: bool, **more: Any) -> None:
    """Print the size of a dataset: in words on standard error, or as JSON with `more`."""
    if as_json:
        size = {"samples": info.num_samples, "shards": len(info.shard_counts)}
        echo_json({"path": redact(path), **size, **more})
        return
    if is_quiet():
        return
    shards = counted(len(info.shard_counts), "shard")
    echo(f"{counted(info.num_samples, 'sample')} in {shards}", err=True)


@contextmanager
def logging_to_terminal(level: int = logging.INFO) -> Iterator[None]:
    """Show warnings, such as those about retries, on standard error.

    Args:
        level: The lowest level that is shown.
    """
    if is_verbose():
        yield  # the option shows everything
        return
    level = max(level, logging.WARNING) if is_quiet() else level
    with logging_at(level, "%(message)s"):
        yield


class Advance(Protocol):
    """Shows how many are done, and of how many if that is known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextmanager
def progress_bar(enabled: bool, doing: str, unit: str = "") -> Iterator[Advance]:
    """Yield a function that shows progress, if there is a terminal."""
    if not enabled or is_quiet() or not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TextColumn(unit))
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(doing, *columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


UPDATE_ITEMS = 512

COUNT = click.IntRange(min=0)
POSITIVE = click.IntRange(min=1)
SIZE = click.FloatRange(min=1)


tar_inputs = click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
tar_allow_option = click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["shell", "pickle"]),
    help="Allow shell commands as addresses (pipe:...), or pickles to be decoded.",
)
progress_option = click.option(
    "--progress/--no-progress", default=True, help="Show a progress bar on terminals."
)


def reporting_progress(
    items: Iterable[T], advance: Callable[[int, int | None], None]
) -> Iterator[T]:
    """Yield items, reporting progress now and then."""
    number = 0
    for number, item in enumerate(items, 1):
        yield item
        if not number % UPDATE_ITEMS:
            advance(number, None)
    advance(number, None)


def report_result(text: str, result: Mapping[str, Any], *, as_json: bool, output: str = "") -> None:
    """Print a result, in words on standard error, where it does not mix with output, or as JSON.

    Args:
        text: The result in words.
        result: The result as plain data.
        as_json: Whether to print JSON.
        output: Where the command has written; JSON then goes to standard error as well if that is
            standard output.
    """
    if as_json:
        write_output(json.dumps(result, indent=2), err=output == "-")
    else:
        echo(text, err=True)
