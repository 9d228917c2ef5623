"""Addresses as arguments of commands: paths, or URLs of datasets in stores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from energon.cli.indexing_options import open_indexing
from energon.errors import ConfigError
from energon.io.epath import AnyPath, EPath, any_path

if TYPE_CHECKING:
    from energon.prepare.engines import Engine

_MEDIA_OPTIONS = ("by_extension", "by_header", "by_glob")
_INDEXING_OPTIONS = (
    *("num_workers", "engine", "address", "progress"),
    *("checksum", "reindex", "wait"),
)


STANDS_FOR = "energon.stands_for"
"""In `context.meta`: the address for which the path of a command stands."""


class AddressType(click.ParamType):  # type: ignore[type-arg]
    """A path of the standard library, or an `EPath` for a URL."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> AnyPath:
        """Return the path that a text stands for."""
        return any_path(value)


ADDRESS = AddressType()


def check_engine(path: EPath, engine: Engine) -> None:
    """Refuse a cluster where shards are read from a store, which this machine does by itself.

    Raises:
        ConfigError: If the engine is one.
    """
    if engine.name != "local":
        raise ConfigError(
            f"{path}: shards in stores are read by this machine, several at a time; leave out "
            f"--engine {engine.name}"
        )


def run_on_stand_in(context: click.Context, path: EPath, exclude: Sequence[str] = ()) -> Any:
    """Run the command of `context` again, on a local folder that stands for a remote dataset.

    What it changes there is uploaded if it succeeds. Media are not looked at. Returns what the
    command returns.
    """
    from energon.prepare.index.index import IndexOptions
    from energon.prepare.remote import standing_in

    given = {**context.params, **{name: None for name in _MEDIA_OPTIONS if name in context.params}}
    with ExitStack() as stack:
        with open_indexing(**{name: given[name] for name in _INDEXING_OPTIONS}) as how:
            folder = stack.enter_context(
                standing_in(
                    path.url,
                    exclude=exclude,
                    options=IndexOptions(how.checksum, how.force),
                    progress=how.progress,
                )
            )
        # Every shard is indexed by now; the shards of the folder have no content.
        context.meta[STANDS_FOR] = path
        return context.invoke(context.command, **{**given, "path": folder, "reindex": False})
