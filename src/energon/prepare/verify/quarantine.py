"""Quarantine files: which samples and shards to exclude.

A text file with one entry per line: a shard by its path below the dataset, or a sample as
`SHARD/KEY`. Or JSON lines with `shard` and, for a sample, `key`; other fields, such as the reason,
are for people. Empty lines, and lines that begin with `#`, are ignored.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Container, Iterable
from pathlib import Path

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.json_text import parse_json
from energon.formats.meta.braces import escape_braces
from energon.io.atomic import write_atomic
from energon.io.epath import AnyPath, any_path
from energon.io.files import read_document
from energon.messages import warn_once
from energon.prepare.files import reporting
from energon.stages.hooks.quarantine import quarantine_name

logger = logging.getLogger("energon")

QuarantineEntry = tuple[str, str | None, str]
"""Shard, sample key (None for the whole shard), and reason."""


def quarantine_files(where: str | os.PathLike[str], dataset: str) -> list[AnyPath]:
    """Return the quarantine files for a dataset: a file itself, or the one named for it.

    Args:
        where: A file, or a folder in which each dataset has one, as written by `Quarantine`.
        dataset: The dataset.

    Raises:
        DatasetNotFoundError: If there is no such file or folder.
    """
    path = any_path(where)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DatasetNotFoundError(f"exclude_from: {path}: no such file or folder")
    name = quarantine_name(dataset)
    if (path / name).is_file():
        return [path / name]
    said = "exclude_from: %s has no %s, so no sample of that dataset is skipped"
    names = os.listdir(path) if isinstance(path, Path) else []
    # A dataset without failures has no file, but a folder of something else is a mistake.
    if names and not any(each.endswith(Path(name).suffix) for each in names):
        warn_once(logger, f"exclude_from: {path}", said, path, name)
    else:
        logger.info(said, path, name)
    return []


def load_quarantine(path: str | os.PathLike[str]) -> list[str]:
    """Return the entries of a quarantine file, in the form of a split's `exclude` list.

    Raises:
        DatasetNotFoundError: If there is no such file.
        ConfigError: If it is invalid.
    """
    with reporting(path):
        lines = read_document(path).decode("utf-8", "surrogateescape").splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            entries.append(_entry(text, f"{path}:{number}"))
    return entries


def entries_without(path: str | Path, shards: Container[str]) -> list[QuarantineEntry]:
    """Return what `write_quarantine` wrote about other shards than these; [] without a file."""
    file = any_path(path)
    if not file.is_file():
        return []
    with reporting(path):
        lines = read_document(file).decode("utf-8", "surrogateescape").splitlines()
    written = [parse_json(line, origin=str(path)) for line in lines if line.startswith("{")]
    return [
        (about["shard"], about.get("key"), str(about.get("reason", "")))
        for about in written
        if isinstance(about, dict) and about.get("shard", "") not in shards and "shard" in about
    ]


def write_quarantine(path: str | Path, entries: Iterable[QuarantineEntry]) -> None:
    """Write a quarantine file, as a whole or not at all.

    Args:
        path: The file.
        entries: What it lists.
    """
    lines = []
    for shard, key, reason in entries:
        about = {"shard": shard, "key": key, "reason": reason}
        lines.append(json.dumps({k: v for k, v in about.items() if v is not None}))
    content = "".join(f"{line}\n" for line in lines).encode()
    file = any_path(path)
    with reporting(path):
        if isinstance(file, Path) and (file.is_file() or not file.exists()):
            write_atomic(file, content)
        else:
            file.write_bytes(content)  # a URL, or a device such as /dev/stdout


def _entry(text: str, origin: str) -> str:
    if not text.startswith("{"):
        return escape_braces(text)
    try:
        about = parse_json(text, origin=origin)
        shard, key = about["shard"], about.get("key")
        if not isinstance(shard, str) or not isinstance(key, (str, type(None))):
            raise TypeError("no text")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{origin}: expected SHARD, SHARD/KEY or {{"shard": …, "key": …}}, found {text!r}'
        ) from error
    return escape_braces(shard if key is None else f"{shard}/{key}")
