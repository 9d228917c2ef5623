"""`energon prepare` of a JSONL file."""

from __future__ import annotations

from pathlib import Path

from energon.cli.echo import echo
from energon.counting import counted
from energon.io.epath import AnyPath

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


def is_jsonl(path: AnyPath) -> bool:
    """Return whether a path is that of a JSONL file, be it compressed."""
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    return name.endswith(".jsonl")


def prepare_jsonl_command(path: AnyPath, split_ratio: str | None) -> None:
    """Index a JSONL file, and say how many samples it has."""
    from energon.prepare.jsonl import prepare_jsonl, prepare_remote_jsonl
    from energon.prepare.splits import parse_ratio

    ratios = parse_ratio(split_ratio) if split_ratio else None
    if isinstance(path, Path):
        num_samples = prepare_jsonl(path, split_ratio=ratios)
    else:
        num_samples = prepare_remote_jsonl(path.url, split_ratio=ratios)
    echo(counted(num_samples, "sample"), err=True)
