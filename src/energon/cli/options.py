"""Options and arguments of several commands: numbers, addresses, how shards are indexed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from energon.allow import CAPABILITIES, VARIABLE, allowed_by_environment
from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.epath import AnyPath, EPath, any_path

if TYPE_CHECKING:
    from energon.prepare.engines import Engine

import logging
import sys
from typing import TYPE_CHECKING

from energon.cli.command_group import echo, echo_json, is_quiet, is_verbose
from energon.io.address import redact
from energon.messages import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from energon.formats.meta.info import DatasetInfo
    from energon.io.epath import AnyPath
    from energon.prepare.dataset import Indexing
    from energon.prepare.engines import EngineName


def parse_field_map(text: str | None) -> dict[str, str] | None:
    """Return what the option says; None if it is not given.

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


F = TypeVar("F", bound=Callable[..., Any])


def allow_option(function: F, *, expose_value: bool = False) -> F:
    """Let a command take `--allow NAME`, which holds for all that it does, in its workers too.

    Args:
        function: The command.
        expose_value: Whether it gets the names as `allow`.
    """
    return click.option(
        "--allow",
        metavar="NAME",
        multiple=True,
        type=click.Choice(list(CAPABILITIES)),
        callback=_allow,
        expose_value=expose_value,
        help=f"Allow data to do what is otherwise refused: {', '.join(CAPABILITIES)}. Repeat.",
    )(function)


def _allow(context: click.Context, _: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    before = os.environ.get(VARIABLE)

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    if names:
        os.environ[VARIABLE] = ",".join(sorted({*names, *allowed_by_environment()}))
        context.call_on_close(restore)
    return names


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def options_object(kind: type[Any], options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that adds options to a command, which gets what they say as `options`.

    Args:
        kind: A dataclass with a field for each option, called like its parameter.
        options: What `click.option` returns, in the order of the help.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*context: Any, **given: Any) -> Any:
            chosen = {each.name: given.pop(each.name) for each in fields(kind)}
            return command(*context, options=kind(**chosen), **given)

        decorated: Callable[..., Any] = run
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return add


def is_given(context: click.Context, name: str) -> bool:
    """Return whether a parameter stands on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_options(context: click.Context, what: str, honoured: Collection[str]) -> None:
    """Refuse the options of a command that do not count for what it is given.

    Args:
        context: The running command.
        what: What it is given, for the message: "x.jsonl is a JSONL file".
        honoured: Names of the parameters that count, or change nothing by their nature.

    Raises:
        ConfigError: If others were given.
    """
    given = [
        each.opts[0]
        for each in context.command.params
        if isinstance(each, click.Option)
        and each.expose_value
        and each.name not in honoured
        and is_given(context, str(each.name))
    ]
    if given:
        verb, it = ("does", "it") if len(given) == 1 else ("do", "them")
        raise ConfigError(f"{what}; {' and '.join(given)} {verb} not apply, leave {it} out")


@contextmanager
def explaining(path: AnyPath) -> Iterator[None]:
    """Say what lies at a path, where the block finds no prepared dataset of shards.

    Raises:
        DatasetNotFoundError: As the block did, with advice.
        ConfigError: If it is a dataset that has no index of shards.
    """
    from energon.metadataset.kind import dataset_kind

    try:
        yield
    except DatasetNotFoundError as error:
        address = os.fspath(path)
        kind = dataset_kind(address)
        if kind == "webdataset":
            raise
        raise ConfigError(
            f"{redact(address)} is a dataset without shards ({kind}), so there is no index of "
            f"them to look after; `energon lint {redact(address)}` decodes its samples"
        ) from error


class AddressType(click.ParamType):  # type: ignore[type-arg]
    """A path of the standard library, or an `EPath` for a URL."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> AnyPath:
        """Return the path that a text stands for."""
        if value == "":
            self.fail("the path is empty; is a variable of the shell not set?", param, ctx)
        return any_path(value)


ADDRESS = AddressType()


def check_engine(path: EPath, engine: Engine) -> None:
    """Refuse a cluster where shards are read from a store, which this machine does on its own.

    Raises:
        ConfigError: If the engine is one.
    """
    if engine.name != "local":
        raise ConfigError(
            f"{path}: shards in stores are read by this machine, several at a time; drop "
            f"--engine {engine.name}"
        )


@contextmanager
def folder_of(path: AnyPath, *, exclude: Sequence[str] = (), **indexing: Any) -> Iterator[Path]:
    """Give the folder of a dataset: its own, or one on this machine that stands for a remote one.

    What is changed in the latter is uploaded at the end, unless there was an error. Its shards
    are indexed already, and have no content.

    Args:
        path: Path or address of the dataset.
        exclude: Regular expressions; shards with one of them in their path are left out.
        indexing: What `open_indexing` takes.
    """
    if isinstance(path, Path):
        yield path
        return
    from energon.prepare.index.index import IndexOptions
    from energon.prepare.remote import standing_in

    with ExitStack() as stack:
        with open_indexing(**indexing) as how:
            options = IndexOptions(how.checksum, how.force)
            folder = stack.enter_context(
                standing_in(path.url, exclude=exclude, options=options, progress=how.progress)
            )
        yield folder


Command = TypeVar("Command", bound=Callable[..., Any])

_PLACE = (
    click.option(
        *("--workers", "--num-workers", "num_workers"),
        type=click.IntRange(1),
        default=16,
        help="Number of processes that read shards.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["local", "dask", "ray"]),
        default="local",
        show_default=True,
        help=(
            "Where shards are read: processes of this machine, or a cluster with access to the "
            "files."
        ),
    ),
    click.option(
        "--address",
        metavar="ADDRESS",
        help="Scheduler or head of the cluster; without it, one is started.",
    ),
    click.option("--progress/--no-progress", default=True, help="Show a progress bar."),
)
_WRITING = (
    click.option(
        "--checksum", is_flag=True, help="Read the contents too, and store a checksum of each."
    ),
    click.option("--reindex", is_flag=True, help="Reread all shards, even unchanged ones."),
    click.option(
        "--wait", is_flag=True, help="Wait for another process that is preparing the dataset."
    ),
)


def indexing_options(command: Command) -> Command:
    """Add the options to a command that indexes; `open_indexing` takes what they say."""
    for option in reversed((*_WRITING, *_PLACE)):
        command = option(command)
    return command


def reading_options(command: Command) -> Command:
    """Add those of the options to a command that say where shards are read."""
    for option in reversed(_PLACE):
        command = option(command)
    return command


@contextmanager
def open_indexing(
    *,
    num_workers: int,
    engine: EngineName,
    address: str | None,
    progress: bool,
    checksum: bool = False,
    reindex: bool = False,
    wait: bool = False,
    sqlite: bool = True,
    fix_duplicates: bool = False,
    doing: str = "indexing shards",
) -> Iterator[Indexing]:
    """Give what the options say, while a bar shows how far it is, if anybody looks."""
    from energon.prepare.dataset import Indexing
    from energon.prepare.engines import Engine

    with logging_to_terminal(), _Bar(progress, doing) as advance:
        yield Indexing(
            engine=Engine(engine, address, num_workers),
            sqlite=sqlite,
            checksum=checksum,
            force=reindex,
            fix_duplicates=fix_duplicates,
            wait=wait,
            progress=advance,
        )


def show_size(info: DatasetInfo, path: AnyPath, *, as_json: bool, **more: Any) -> None:
    """Say how large a dataset is: in words on standard error, or as JSON with `more`."""
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
    """Show warnings, as those about calls that are tried again, on standard error.

    Args:
        level: What is shown at least.
    """
    if is_verbose():
        yield  # the option shows all there is
        return
    level = max(level, logging.WARNING) if is_quiet() else level
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("energon")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before, level) if before else level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Bar:
    """A progress bar on standard error."""

    def __init__(self, wanted: bool, doing: str) -> None:
        self.doing = doing
        self.wanted = wanted and not is_quiet() and sys.stderr.isatty()

    def __enter__(self) -> _Bar:
        if self.wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            self.bar = Progress(
                self.doing,
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        if self.wanted:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.bar.stop()
