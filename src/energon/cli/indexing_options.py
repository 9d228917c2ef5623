"""The options that all commands have that index shards, and the bar that shows how far they are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from energon.cli.verbosity import echo, echo_json, is_quiet, is_verbose
from energon.io.address import redact
from energon.messages import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from energon.formats.meta.info import DatasetInfo
    from energon.io.epath import AnyPath
    from energon.prepare.dataset import Indexing
    from energon.prepare.engines import EngineName

Command = TypeVar("Command", bound=Callable[..., Any])

_PLACE = (
    click.option(
        *("--workers", "--num-workers", "num_workers"),
        default=16,
        help="Processes that read shards.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["local", "dask", "ray"]),
        default="local",
        show_default=True,
        help="Where shards are read: processes of this machine, or a cluster that sees the files.",
    ),
    click.option(
        "--address", metavar="ADDRESS", help="Scheduler or head of the cluster; none starts one."
    ),
    click.option("--progress/--no-progress", default=True, help="Show how far it is."),
)
_WRITING = (
    click.option(
        "--checksum", is_flag=True, help="Read the contents, too, and keep a checksum of each."
    ),
    click.option("--reindex", is_flag=True, help="Read shards that have not changed, too."),
    click.option(
        "--wait", is_flag=True, help="Wait for another process that prepares the dataset."
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
