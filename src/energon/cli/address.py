"""Addresses as arguments of commands: paths, or URLs of datasets in stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from energon.cli.indexing_options import open_indexing
from energon.errors import ConfigError
from energon.io.epath import AnyPath, EPath, any_path

if TYPE_CHECKING:
    from energon.prepare.engines import Engine


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


@contextmanager
def folder_of(path: AnyPath, *, exclude: Sequence[str] = (), **indexing: Any) -> Iterator[Path]:
    """Give the folder of a dataset: its own, or one on this machine that stands for a remote one.

    What is changed in the latter is uploaded at the end, unless there was an error. Its shards
    are indexed already, and have no content.

    Args:
        path: Where the dataset is.
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
