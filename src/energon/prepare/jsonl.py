"""Prepare JSONL files: index their lines, and deal them to splits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

from energon.errors import ConfigError
from energon.formats.jsonl import (
    COMPRESSED,
    JsonlSplit,
    jsonl_index_path,
    jsonl_split_path,
    parse_jsonl_split,
    scan_jsonl,
)
from energon.io.address import local_path
from energon.io.atomic import atomic_path, write_atomic
from energon.prepare.files import reporting

_ADVICE = {".gz": "gunzip -k", ".zst": "zstd -d", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}


def prepare_jsonl(
    path: str | os.PathLike[str], *, split_ratio: Mapping[str, float] | None = None
) -> int:
    """Index a JSONL file, and deal its samples to splits.

    Args:
        path: The file.
        split_ratio: Ratio by name of the split, for consecutive samples; None leaves the splits
            that there are. Without any, each split is the whole file.

    Returns:
        How many samples it has.

    Raises:
        DatasetNotFoundError: If there is no such file.
        ConfigError: If it is compressed.
        FormatError: If a line is no JSON object.
    """
    file = Path(local_path(path))
    if file.name.endswith(COMPRESSED):
        raise ConfigError(
            f"{file}: lines of a compressed file cannot be read one by one; unpack it first with "
            f"`{_ADVICE[file.suffix]} {file}`"
        )
    index = Path(jsonl_index_path(file))
    numbers = 0
    with reporting(file), atomic_path(index) as temporary, open(temporary, "wb") as out:
        for offsets in scan_jsonl(file):
            out.write(offsets.astype("<u8").tobytes())
            numbers += len(offsets)
    split = _present_split(file)
    unmatched = split.unmatched(file.name, numbers - 1)
    if unmatched:
        raise ConfigError(f"{split.origin}: {unmatched[0]}; correct the entry, or delete it")
    if split_ratio is not None:
        _write_splits(file, numbers - 1, split_ratio)
    return numbers - 1


def _present_split(file: Path) -> JsonlSplit:
    path = Path(jsonl_split_path(file))
    return parse_jsonl_split(path.read_text() if path.exists() else None, origin=str(path))


def _write_splits(file: Path, num_samples: int, ratios: Mapping[str, float]) -> None:
    """Deal every sample to a split, consecutive ones together."""
    path = Path(jsonl_split_path(file))
    exclude = _present_split(file).exclude
    names = [name for name, ratio in ratios.items() if ratio > 0]
    total = sum(ratios[name] for name in names)
    shares = accumulate((ratios[name] for name in names), initial=0.0)
    edges = [round(num_samples * share / total) for share in shares]
    parts = {name: (a, b) for name, (a, b) in zip(names, pairwise(edges), strict=True) if a < b}
    with reporting(path):
        write_atomic(path, JsonlSplit(parts, exclude).to_yaml())
