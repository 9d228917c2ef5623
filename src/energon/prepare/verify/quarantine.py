"""Quarantine files: which samples and shards to exclude.

A text file with one entry per line: a shard by its path below the dataset, or a sample as
`SHARD/KEY`. Or JSON lines with `shard` and, for a sample, `key`, and the address of the `dataset`;
other fields, such as the reason, are for people. Empty lines, and lines that begin with `#`, are
ignored.

An entry that names its dataset concerns no other one. One that names none concerns the dataset
that the file is given for, or, in a folder of files, the one after which the file is named.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Container, Iterable
from pathlib import Path
from typing import NamedTuple

from energon.errors import ConfigError, DatasetNotFoundError
from energon.formats.meta.braces import escape_braces
from energon.formats.text import parse_json
from energon.io.address import redact, same_dataset
from energon.io.atomic import write_atomic
from energon.io.epath import AnyPath, any_path
from energon.io.files import read_document
from energon.io.threads import fork_safe_lock
from energon.messages import list_names, warn_once
from energon.prepare.files import reporting
from energon.stages.hooks.failures import quarantine_line, quarantine_name

logger = logging.getLogger("energon")


class QuarantineEntry(NamedTuple):
    """A line of a quarantine file."""

    dataset: str
    """The address of the dataset; "" if the line does not say."""
    shard: str
    key: str | None
    """None for the whole shard."""
    reason: str = ""

    @property
    def excluded(self) -> str:
        """The entry in the form of the `exclude` list of a split."""
        return escape_braces(self.shard if self.key is None else f"{self.shard}/{self.key}")


class Exclusions:
    """The samples of some datasets that quarantine files list.

    Args:
        where: A file, or a folder in which datasets have files, as written by `Quarantine`.
        datasets: The addresses of all datasets of the run.

    Raises:
        DatasetNotFoundError: If there is no such file or folder.
        ConfigError: If a file is invalid, or does not name its dataset.
    """

    def __init__(self, where: str | os.PathLike[str], datasets: Iterable[str]) -> None:
        if not isinstance(where, str | os.PathLike):
            raise ConfigError(
                f"exclude_from={where!r}: expected the folder of quarantine files, or one of them"
            )
        self._path = any_path(where)
        self._datasets = sorted(set(datasets))
        if not self._path.is_file() and not self._path.is_dir():
            raise DatasetNotFoundError(f"exclude_from: {self._path}: no such file or folder")
        self._is_folder = not self._path.is_file()
        self._files: dict[str, list[QuarantineEntry]] = {}
        self._lock = fork_safe_lock()

    def of(self, dataset: str) -> dict[str, list[str]]:
        """Return excluded samples of a dataset, by file, as in the `exclude` list of a split."""
        file = self._path / quarantine_name(dataset) if self._is_folder else self._path
        origin = str(file)
        with self._lock:
            if origin not in self._files:
                self._files[origin] = load_quarantine(file) if file.is_file() else []
                if not file.is_file():
                    self._report_missing(file)
        entries = self._files[origin]
        named = {entry.dataset for entry in entries}
        if "" in named:
            self._check_unnamed(origin, dataset)
        own = {each for each in named if not each or same_dataset(each, dataset)}
        if entries and not own:
            self._report_others(origin, dataset, named)
        excluded = [entry.excluded for entry in entries if entry.dataset in own]
        return {origin: excluded} if excluded else {}

    def _check_unnamed(self, file: str, dataset: str) -> None:
        """Refuse entries that could be meant for several datasets."""
        name = quarantine_name(dataset)
        meant = [
            each for each in self._datasets if not self._is_folder or quarantine_name(each) == name
        ]
        if len(meant) > 1:
            names = ", ".join(map(redact, meant[:3]))
            raise ConfigError(
                f"exclude_from: {file} has lines that do not name a dataset, and there are "
                f"{len(meant)}: {names}{', …' if len(meant) > 3 else ''}; write lines like "
                f"{quarantine_line(dataset, 'SHARD', 'KEY')}"
            )

    def _report_missing(self, file: AnyPath) -> None:
        message = "exclude_from: %s has no %s, so no sample of that dataset is skipped"
        names = os.listdir(self._path) if isinstance(self._path, Path) else []
        # A dataset without failures has no file, but a folder of something else is a mistake.
        if names and not any(each.endswith(file.suffix) for each in names):
            warn_once(logger, f"exclude_from: {file}", message, self._path, file.name)
        else:
            logger.info(message, self._path, file.name)

    def _report_others(self, file: str, dataset: str, named: Collection[str]) -> None:
        """Warn that a file is about datasets that are not part of the run; one may have moved."""
        strangers = [
            each
            for each in sorted(named)
            if not any(same_dataset(each, other) for other in self._datasets)
        ]
        if strangers:
            warn_once(
                logger,
                f"exclude_from: {file} {dataset}",
                "exclude_from: %s lists samples of %s, so no sample of %s is skipped; if that "
                "dataset has moved, correct its address in the file",
                file,
                list_names(strangers, 3),
                redact(dataset),
            )


def load_quarantine(path: str | os.PathLike[str]) -> list[QuarantineEntry]:
    """Return the entries of a quarantine file.

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
    """Return the lines of `write_quarantine` about other shards; [] without a file."""
    if not any_path(path).is_file():
        return []
    return [entry for entry in load_quarantine(path) if entry.shard not in shards]


def check_quarantine(path: str | Path, *, is_metadataset: bool) -> None:
    """Raise an error if quarantine files could not be written, before they are needed.

    Args:
        path: The file; of a metadataset, the folder in which each of its datasets gets a file.
        is_metadataset: Whether a metadataset is checked.

    Raises:
        ConfigError: If they could not.
    """
    target = any_path(path)
    if not isinstance(target, Path):
        return  # a store says so when it is written to
    if is_metadataset and target.exists() and not target.is_dir():
        raise ConfigError(
            f"--quarantine {path}: is a file, and a metadataset needs a folder, in which each of "
            "its datasets gets a file"
        )
    if not is_metadataset and target.is_dir():
        raise ConfigError(f"--quarantine {path}: is a folder, expected a file")
    folder = target.absolute() if is_metadataset else target.absolute().parent
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        if is_metadataset or target.is_file() or not target.exists():
            with tempfile.TemporaryFile(dir=existing):
                pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--quarantine {path}: cannot write to {existing}: {reason}") from error


def write_quarantine(path: str | Path, entries: Iterable[QuarantineEntry]) -> None:
    """Write a quarantine file, as a whole or not at all.

    Args:
        path: The file.
        entries: Its content.
    """
    content = "".join(f"{quarantine_line(*entry)}\n" for entry in entries).encode()
    file = any_path(path)
    with reporting(path):
        if isinstance(file, Path) and (file.is_file() or not file.exists()):
            write_atomic(file, content)
        else:
            file.write_bytes(content)  # a URL, or a device such as /dev/stdout


def _entry(text: str, origin: str) -> QuarantineEntry:
    if not text.startswith("{"):
        return QuarantineEntry("", text, None)
    try:
        fields = parse_json(text, origin=origin)
        dataset, shard, key = fields.get("dataset", ""), fields["shard"], fields.get("key")
        if not all(isinstance(each, str) for each in (dataset, shard, "" if key is None else key)):
            raise TypeError("no text")
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{origin}: expected SHARD, SHARD/KEY or {{"shard": …, "key": …}}, found {text!r}'
        ) from error
    return QuarantineEntry(dataset, shard, key, str(fields.get("reason", "")))
