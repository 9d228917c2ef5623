"""Pack the samples of tar archives, including compressed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from energon.formats.meta.split import guess_splits
from energon.formats.tar.names import split_name
from energon.formats.tar.sample_parser import SampleParser
from energon.formats.tar.stream import StreamReader
from energon.io.epath import AnyPath
from energon.limits import TAR_PART_BYTES, UNPACKED_BYTES
from energon.prepare.files import reporting
from energon.prepare.importers.row import PackSource, Selects, every
from energon.prepare.importers.selection import (
    FileSelection,
    is_about_data,
    open_decompressed,
)
from energon.prepare.index.index import COMPRESSED_SHARDS

ARCHIVE_SUFFIXES = (".tar", *COMPRESSED_SHARDS)
INDEX_SUFFIXES = (".idx", ".parts", ".json")
"""Names of files next to archives that describe them."""


def is_archive(name: str) -> bool:
    """Return whether a file is a tar archive, judging by its name."""
    return name.lower().endswith(ARCHIVE_SUFFIXES)


class ArchiveSource(PackSource):
    """The samples of archives, in the order of their paths.

    They have splits if the paths of all archives tell which split they are in.

    Args:
        files: The archives, possibly among other files.
        prefix_keys: Whether to prefix the key of each sample with the name of its archive.
    """

    def __init__(self, files: FileSelection, *, prefix_keys: bool = False) -> None:
        self.folder = files.folder
        self.prefix_keys = prefix_keys
        archives = [name for name in files.names if is_archive(name)]
        self._left_out = [
            f"{name}: not an archive, unlike other files here"
            for name in files.names
            if not (is_archive(name) or name.endswith(INDEX_SUFFIXES) or is_about_data(name))
        ]
        self._splits = guess_splits(archives, by_file=True, origin=str(files.folder))

    def samples(
        self, split: str, start: int = 0, is_selected: Selects = every
    ) -> Iterator[Mapping[str, Any]]:
        for name in self._splits[split]:
            prefix = f"{_stem(name)}/" if self.prefix_keys else ""
            chosen = _NeededFiles(start, is_selected, prefix, {"folder": name.rpartition("/")[0]})
            for sample in _read(self.folder / name, chosen):
                yield {**sample, "__key__": prefix + sample["__key__"]}
            start -= chosen.num_seen


class _NeededFiles:
    """Splits the names of files into key and part, and counts samples.

    Args:
        start: How many samples to skip.
        is_selected: Returns by key and row whether a sample is needed.
        prefix: What comes before keys.
        row: The same for all samples.
    """

    def __init__(
        self, start: int, is_selected: Selects, prefix: str, row: Mapping[str, Any]
    ) -> None:
        self.num_seen = 0
        self._start, self._is_selected = start, is_selected
        self._prefix, self._row = prefix, row
        self._key: str | None = None
        self._is_needed = False

    def __call__(self, name: str) -> tuple[str, str] | None:
        """Return key and part of a file; None if it is not needed, and not read."""
        names = split_name(name)
        if names is not None and names[0] != self._key:
            self._key = names[0]
            self._is_needed = self.num_seen >= self._start and self._is_selected(
                self._prefix + self._key, self._row
            )
            self.num_seen += 1
        return names if self._is_needed else None


def _read(path: AnyPath, chosen: _NeededFiles) -> Iterator[Mapping[str, Any]]:
    with reporting(path), open_decompressed(path, advice="restore the archive") as file:
        # What is compressed is decompressed anyway.
        is_compressed = not file.seekable()
        limit = UNPACKED_BYTES if is_compressed else TAR_PART_BYTES
        parser = SampleParser(str(path), split=chosen, part_limit=limit)
        reader = StreamReader(file, parser, reads_all=is_compressed)
        while (samples := reader.next_block()) is not None:
            yield from samples


def _stem(name: str) -> str:
    for suffix in sorted(ARCHIVE_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
