"""`energon prepare` and `energon index` of a JSONL file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from energon.cli.echo import echo, echo_json
from energon.cli.options import refuse_options
from energon.cli.verbosity import is_quiet
from energon.counting import counted
from energon.io.address import redact
from energon.io.epath import AnyPath

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_HONOURED = {
    *("ratio", "exclude_from", "as_json"),
    # There is no such thing, nobody is asked, all is read anew, by this process alone:
    *("no_sqlite", "skip_dataset_yaml", "non_interactive", "force_overwrite", "write"),
    *("reindex", "wait", "num_workers", "progress"),
}


def is_jsonl(path: AnyPath) -> bool:
    """Return whether a path is that of a JSONL file, be it compressed."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return name.endswith(".jsonl")


def prepare_jsonl_command(
    context: click.Context,
    path: AnyPath,
    *,
    split_ratio: str | None = None,
    exclude_from: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Index a JSONL file, and say how many samples it has.

    Raises:
        ConfigError: If the command has options that mean nothing for such files.
    """
    from energon.prepare.jsonl import prepare_jsonl, prepare_remote_jsonl
    from energon.prepare.splits import parse_ratio

    refuse_options(context, f"{redact(path)} is a JSONL file", _HONOURED)
    how: dict[str, Any] = {
        "split_ratio": parse_ratio(split_ratio) if split_ratio else None,
        "exclude_from": exclude_from,
    }
    if isinstance(path, Path):
        num_samples = prepare_jsonl(path, **how)
    else:
        num_samples = prepare_remote_jsonl(path.url, **how)
    if as_json:
        echo_json({"path": redact(path), "samples": num_samples})
    elif not is_quiet():
        echo(counted(num_samples, "sample"), err=True)
