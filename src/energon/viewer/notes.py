"""Excluded and flagged samples.

Both are listed in quarantine files, one per dataset. An excluded sample is an entry that loaders
and `energon prepare` read; a flag is a comment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from energon.errors import ConfigError
from energon.formats.text import parse_json
from energon.io.address import local_path, same_dataset
from energon.io.atomic import write_atomic
from energon.sources.source import Location
from energon.stages.hooks.failures import quarantine_file, quarantine_line

NOTE = "# note "
MAX_NOTE = 1000


class SampleNote(NamedTuple):
    """The note about a sample."""

    excluded: bool
    reason: str


class Notes:
    """Quarantine files in a folder. Thread-safe.

    Args:
        folder: Created if it does not exist.

    Raises:
        ConfigError: If the folder is not on this machine, or cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(local_path(folder))
        self._lock = Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write quarantine files here: {error}") from error

    def file(self, dataset: str) -> Path:
        """Return the file for the samples of a dataset."""
        return quarantine_file(self.folder, dataset)

    def of(self, dataset: str) -> dict[tuple[str, str | None], SampleNote]:
        """Return the notes about the samples of a dataset, by shard and key."""
        entries = (_entry(line, dataset) for line in self._lines(dataset))
        return dict(entry for entry in entries if entry is not None)

    def say(
        self, dataset: str, samples: Sequence[Location], *, excluded: bool, reason: str
    ) -> None:
        """Exclude or flag samples; replaces earlier notes about them."""
        mark = "" if excluded else NOTE
        lines = [
            mark + quarantine_line(dataset, sample.shard, sample.key, reason[:MAX_NOTE])
            for sample in samples
        ]
        with self._lock:
            self._write(dataset, [*self._others(dataset, samples), *lines])

    def forget(self, dataset: str, samples: Sequence[Location]) -> None:
        """Remove the notes about samples."""
        with self._lock:
            self._write(dataset, self._others(dataset, samples))

    def _others(self, dataset: str, samples: Sequence[Location]) -> list[str]:
        """Return the lines that are not about some samples."""
        entries = [(line, _entry(line, dataset)) for line in self._lines(dataset)]
        theirs = {(sample.shard, sample.key) for sample in samples}
        return [line for line, entry in entries if entry is None or entry[0] not in theirs]

    def _lines(self, dataset: str) -> list[str]:
        try:
            return self.file(dataset).read_text("utf-8", "surrogateescape").splitlines()
        except FileNotFoundError:
            return []

    def _write(self, dataset: str, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        write_atomic(self.file(dataset), text.encode("utf-8", "surrogateescape"))


def _entry(line: str, dataset: str) -> tuple[tuple[str, str | None], SampleNote] | None:
    """Return the shard and the key of a sample of a dataset, and the note about it."""
    text = line.strip()
    excluded = not text.startswith(NOTE)
    try:
        fields = parse_json(text.removeprefix(NOTE), origin="a quarantine file")
        if not same_dataset(fields.get("dataset", dataset), dataset):
            return None
        return (fields["shard"], fields.get("key")), SampleNote(
            excluded, str(fields.get("reason", ""))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # an entry of another form, or a comment
