"""`energon prepare` and `energon index` of datasets that are files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from energon.cli.options import refuse_options
from energon.cli.verbosity import echo, echo_json, is_quiet
from energon.io.address import redact
from energon.io.epath import AnyPath
from energon.messages import counted

if TYPE_CHECKING:
    from energon.prepare.upkeep import Upkeep

_HONOURED = {
    *("ratio", "exclude_from", "as_json"),
    # There is no such thing, nobody is asked, all is read anew, by this process alone:
    *("no_sqlite", "skip_dataset_yaml", "non_interactive", "force_overwrite", "write"),
    *("reindex", "wait", "num_workers", "progress"),
}


def prepare_file(
    context: click.Context,
    path: AnyPath,
    upkeep: Upkeep,
    *,
    split_ratio: str | None = None,
    exclude_from: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Prepare a dataset by what its kind does for that, and say how many samples it has.

    Raises:
        ConfigError: If the command has options that mean nothing for such files.
    """
    from energon.prepare.splits import parse_ratio

    refuse_options(context, f"{redact(path)} is {upkeep.noun}", _HONOURED)
    num_samples = upkeep.prepare(
        os.fspath(path),
        split_ratio=parse_ratio(split_ratio) if split_ratio else None,
        exclude_from=exclude_from,
    )
    if as_json:
        echo_json({"path": redact(path), "samples": num_samples})
    elif not is_quiet():
        echo(counted(num_samples, "sample"), err=True)
