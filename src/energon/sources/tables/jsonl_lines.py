"""The lines of a JSONL file, by number and as files by name."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import DatasetNotFoundError, NoSuchFileError, ShardChangedError
from energon.formats.meta.jsonl import (
    PART,
    is_packed,
    jsonl_copy_path,
    jsonl_index_path,
    jsonl_points_path,
    load_jsonl_index,
)
from energon.formats.seek_points import SeekPoints
from energon.io.address import address_name, redact
from energon.io.backends.base import ObjectInfo
from energon.io.disk_cache import disk_cache
from energon.io.epath import AnyPath, any_path
from energon.io.files import file_info
from energon.io.range_file import RangeFile, range_file
from energon.local_file import map_file
from energon.messages import shell_word
from energon.samples.provenance import SourceInfo
from energon.sources.browse.tree import BrowsedFile, BrowsedFolder, TreeEntry
from energon.sources.files.locate import local_copy
from energon.sources.files.store import FileStore
from energon.sources.shards import read_spans
from energon.sources.tables.unpacked_file import UnpackedFile


class JsonlFile:
    """The lines of an indexed JSONL file, opened with the first read. Copies open it again.

    Args:
        path: The file, here or in an object store.

    Raises:
        DatasetNotFoundError: If it is missing, or not indexed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = any_path(path)
        address = os.fspath(self.path)
        about = file_info(address)
        if about is None:
            raise DatasetNotFoundError(
                f"{self.path} does not exist; run `energon prepare {shell_word(self.path)}`"
            )
        self._about = about
        self._index = _beside(jsonl_index_path(address), about, self.path)
        if is_packed(self.path):
            self._points = _beside(jsonl_points_path(address), about, self.path)

    def __reduce__(self) -> tuple[type[JsonlFile], tuple[AnyPath]]:
        return JsonlFile, (self.path,)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._about.size

    @cached_property
    def file(self) -> RangeFile:
        """The file, open; if it is compressed, its content."""
        address = os.fspath(self.path)
        file = range_file(address, info=self._about)
        if self.points is None:
            return file
        return UnpackedFile(self._copy(self.points) if self.points.is_copy else file, self.points)

    def _copy(self, points: SeekPoints) -> RangeFile:
        """Return the copy of a zstd file in short frames, open.

        Raises:
            DatasetNotFoundError: If it is missing.
            ShardChangedError: If it is not the one that was indexed.
        """
        address = os.fspath(_beside(jsonl_copy_path(self.path), self._about, self.path))
        about = file_info(address)
        if about is None or about.size != points.packed_size:
            found = "is missing" if about is None else f"has {about.size} bytes"
            raise ShardChangedError(
                f"{redact(address)}: {found}, had {points.packed_size} bytes when it was "
                f"written; run `energon prepare {shell_word(self.path)}` again"
            )
        return range_file(address, info=about)

    @cached_property
    def points(self) -> SeekPoints | None:
        """Where a compressed file can be entered; None for others."""
        if not is_packed(self.path):
            return None
        return SeekPoints.parse(_content(self._points), size=self.size, origin=str(self.path))

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each sample begins, and the size of the file or of what is in it."""
        size = self.size if self.points is None else self.points.unpacked_size
        return load_jsonl_index(_content(self._index), size=size, origin=str(self.path))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, numbers: Ints) -> list[bytes]:
        """Return lines by number, without the space around them; numbers ascend.

        Raises:
            ShardChangedError: If there is something else where a line was indexed.
        """
        if not len(numbers):
            return []
        low, high = self.extents(numbers)
        buffers, begin = read_spans(self.file, low, high)
        bounds = zip(buffers, (low - begin).tolist(), (high - begin).tolist(), strict=True)
        lines = [buffer[start:stop].strip() for buffer, start, stop in bounds]
        if numbers[0] == 0 and lines[0].startswith(BOM_UTF8):
            lines = [line.removeprefix(BOM_UTF8) for line in lines]
        for number, line in zip(numbers.tolist(), lines, strict=True):
            if line[:1] != b"{":
                raise ShardChangedError(
                    f"{self.path}: sample {number} begins with {line[:20]!r}, not with an object; "
                    "the file was changed since it was indexed, run `energon prepare "
                    f"{shell_word(self.path)}` again"
                )
        return lines

    def browsed(self, number: int) -> BrowsedFile:
        """Return a line as a file, without a byte order mark."""
        start, stop = self.offsets[number : number + 2].tolist()
        if start == 0 and self.file.pread(0, min(stop, len(BOM_UTF8))) == BOM_UTF8:
            start = len(BOM_UTF8)
        return BrowsedFile(lambda: self.file, start, stop - start)

    def extents(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return where lines begin and end."""
        return self.offsets[numbers].astype(np.int64), self.offsets[numbers + 1].astype(np.int64)


def _beside(address: str, about: ObjectInfo, file: AnyPath) -> AnyPath:
    """Return where an index is: beside its file, or in the user's cache if that is read-only.

    Raises:
        DatasetNotFoundError: If it is in neither place.
    """
    path = any_path(address)

    def missing() -> bytes:
        raise DatasetNotFoundError(f"{path} is missing; run `energon prepare {shell_word(file)}`")

    if path.is_file():
        return path
    kept = disk_cache().keep_for(address, about, missing)
    return kept if isinstance(kept, Path) else path


def _content(path: AnyPath) -> Any:
    """Return the bytes of an index, mapped into memory if they are on this machine."""
    copy = local_copy(path)
    return copy if isinstance(copy, bytes) else map_file(copy)


class JsonlFileStore(FileStore[bytes]):
    """The lines of a JSONL file, by the names `0.json`, `1.json` and so on.

    Args:
        jsonl_path: The file, which was indexed by `energon prepare`.
    """

    def __init__(self, jsonl_path: str | os.PathLike[str]) -> None:
        self.lines = JsonlFile(jsonl_path)

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        return self.get_many_raw([name])[0]

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        numbers = np.array([self._number(name) for name in names], np.int64)
        order = np.argsort(numbers, kind="stable")
        found = dict(zip(order.tolist(), self.lines.read(numbers[order]), strict=True))
        shard = address_name(self.lines.path)
        return [
            (found[place], SourceInfo(self.get_path(), name, shard, (name,)))
            for place, name in enumerate(names)
        ]

    def get_path(self) -> str:
        return str(self.lines.path)

    def names(self) -> Iterator[str]:
        """Yield the names of all lines."""
        return (f"{number}.{PART}" for number in range(len(self.lines)))

    def __contains__(self, name: str) -> bool:
        number, _, part = name.partition(".")
        known = number == "0" or (number.isascii() and number.isdecimal() and number[0] != "0")
        return known and part == PART and int(number) < len(self.lines)

    def _number(self, name: str) -> int:
        if name not in self:
            raise NoSuchFileError(
                f"{name!r} is not in {self.get_path()}, whose lines are called 0.{PART} to "
                f"{len(self.lines) - 1}.{PART}"
            )
        return int(name.partition(".")[0])


@dataclass(frozen=True)
class LinesFolder:
    """The lines of a JSONL file, as files `0.json`, `1.json` and so on."""

    lines: JsonlFile

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the names of all lines."""
        return (TreeEntry(f"{number}.json", False) for number in range(len(self.lines)))

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a line by name."""
        number = name.removesuffix(".json")
        if not (number.isascii() and number.isdecimal()) or name != f"{int(number)}.json":
            return None
        at = int(number)
        if at >= len(self.lines):
            return None
        return self.lines.browsed(at)
