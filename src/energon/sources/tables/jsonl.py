"""The lines of a JSONL file, by ordinal and as files by name."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EmptyDatasetError,
    NoSuchFileError,
    ShardChangedError,
    TruncatedError,
)
from energon.formats.compressed import SeekPoints
from energon.formats.meta.info import numbers_in
from energon.formats.meta.jsonl import (
    PART,
    JsonlSplit,
    describe_unmatched_lines,
    is_packed,
    jsonl_copy_path,
    jsonl_index_path,
    jsonl_points_path,
    jsonl_split_path,
    load_jsonl_index,
    parse_jsonl_split,
)
from energon.io.address import address_name, redact
from energon.io.backends.base import ObjectInfo
from energon.io.disk_cache import disk_cache
from energon.io.epath import AnyPath, any_path
from energon.io.files import file_info
from energon.io.range_file import RangeFile, range_file
from energon.io.threads import fork_safe_lock
from energon.local_file import decode_utf8, map_file
from energon.messages import shell_word
from energon.metadataset.leaf import Leaf
from energon.plan.leaves.subset import resolve_range
from energon.samples.provenance import SourceInfo
from energon.sources.decoded_blocks import DecodedBlocks, SliceCost
from energon.sources.files.locate import local_copy
from energon.sources.files.store import FileStore
from energon.sources.kinds import (
    DatasetKind,
    description,
    split_description,
)
from energon.sources.part_statistics import PartStatistics, SizeStatistics
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool, read_spans
from energon.sources.source import (
    TRAIN_SPLIT,
    Extents,
    OpenRequest,
    SampleSelection,
    content_fingerprint,
)
from energon.sources.tables.row_kind import Item, ItemSource
from energon.sources.tree import BrowsedFile, BrowsedFolder, Contents, TreeEntry
from energon.sources.webdataset import warn_unmatched


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
        info = file_info(address)
        if info is None:
            raise DatasetNotFoundError(
                f"{self.path} does not exist; run `energon prepare {shell_word(self.path)}`"
            )
        self._info = info
        self._index = _beside(jsonl_index_path(address), info, self.path)
        if is_packed(self.path):
            self._points = _beside(jsonl_points_path(address), info, self.path)

    def __reduce__(self) -> tuple[type[JsonlFile], tuple[AnyPath]]:
        return JsonlFile, (self.path,)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._info.size

    @cached_property
    def file(self) -> RangeFile:
        """The file, open; if it is compressed, its content."""
        address = os.fspath(self.path)
        file = range_file(address, info=self._info)
        if self.points is None:
            return file
        return UnpackedFile(self._copy(self.points) if self.points.is_copy else file, self.points)

    def _copy(self, points: SeekPoints) -> RangeFile:
        """Return the copy of a compressed file in short frames, open.

        Raises:
            DatasetNotFoundError: If it is missing.
            ShardChangedError: If it is not the one that was indexed.
        """
        address = os.fspath(_beside(jsonl_copy_path(self.path), self._info, self.path))
        info = file_info(address)
        if info is None or info.size != points.packed_size:
            problem = "is missing" if info is None else f"has {info.size} bytes"
            raise ShardChangedError(
                f"{redact(address)}: {problem}, had {points.packed_size} bytes when it was "
                f"written; run `energon prepare {shell_word(self.path)}` again"
            )
        return range_file(address, info=info)

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

    def names(self) -> Iterator[str]:
        """Yield the names of all lines as files: `0.json`, `1.json` and so on."""
        return (f"{number}.{PART}" for number in range(len(self)))

    def number_of(self, name: str) -> int | None:
        """Return the number of the line that has a name; None if there is none."""
        number, _, part = name.partition(".")
        return next((n for n in numbers_in(number) if part == PART and n < len(self)), None)

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


def _beside(address: str, info: ObjectInfo, file: AnyPath) -> AnyPath:
    """Return where an index is: beside its file, or in the user's cache if that is read-only.

    Raises:
        DatasetNotFoundError: If it is in neither place.
    """
    path = any_path(address)

    def missing() -> bytes:
        raise DatasetNotFoundError(f"{path} is missing; run `energon prepare {shell_word(file)}`")

    if path.is_file():
        return path
    kept = disk_cache().keep_for(address, info, missing)
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
        lines = dict(zip(order.tolist(), self.lines.read(numbers[order]), strict=True))
        shard = address_name(self.lines.path)
        return [
            (lines[index], SourceInfo(self.get_path(), name, shard, (name,)))
            for index, name in enumerate(names)
        ]

    def get_path(self) -> str:
        return str(self.lines.path)

    def names(self) -> Iterator[str]:
        """Yield the names of all lines."""
        return self.lines.names()

    def __contains__(self, name: str) -> bool:
        return self.lines.number_of(name) is not None

    def _number(self, name: str) -> int:
        number = self.lines.number_of(name)
        if number is None:
            raise NoSuchFileError(
                f"{name!r} is not in {self.get_path()}, whose lines are called 0.{PART} to "
                f"{len(self.lines) - 1}.{PART}"
            )
        return number


@dataclass(frozen=True)
class LinesFolder:
    """The lines of a JSONL file, as files `0.json`, `1.json` and so on."""

    lines: JsonlFile

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the names of all lines."""
        return (TreeEntry(name, False) for name in self.lines.names())

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return a line by name."""
        number = self.lines.number_of(name)
        return None if number is None else self.lines.browsed(number)


class UnpackedFile:
    """The content of a compressed file. May be used by many threads.

    Args:
        file: The compressed file.
        points: Its table of points.
    """

    is_remote: ClassVar[bool] = False

    def __init__(self, file: RangeFile, points: SeekPoints) -> None:
        self.path = file.path
        self.packed = file
        self.points = points
        self._unpacked: DecodedBlocks[int, bytes] = DecodedBlocks()
        self._lock = fork_safe_lock()

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of the content from `offset`.

        Raises:
            TruncatedError: If it ends earlier.
            FormatError: If the file is damaged.
        """
        return self.pread_many([offset], [size])[0]

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, see `pread`."""
        low = np.asarray(offsets, np.int64)
        high = low + np.asarray(sizes, np.int64)
        if len(high) and high.max() > self.points.unpacked_size:
            raise TruncatedError(
                f"{self.path}: its content ends at byte {self.points.unpacked_size}, expected "
                f"bytes up to {high.max()}"
            )
        first = self.points.holding(low)
        last = self.points.holding(np.maximum(low, high - 1))
        with self._lock:
            numbers = {n for a, b in zip(first, last, strict=True) for n in range(a, b + 1)}
            unpacked = self._unpack(sorted(numbers))
            ranges = []
            for a, b, start, stop in zip(first, last, low.tolist(), high.tolist(), strict=True):
                pieces = [unpacked[n] for n in range(a, b + 1)]
                content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                begin = int(self.points.starts[a])
                ranges.append(content[start - begin : stop - begin])
        return ranges

    def packed_extents(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of the file that ranges of the content need."""
        starts, _ = self.points.packed_range(self.points.holding(low))
        _, stops = self.points.packed_range(self.points.holding(high - 1))
        return starts, stops

    @property
    def mean_interval(self) -> float:
        """Average number of bytes between two points, which are unpacked together."""
        return self.points.unpacked_size / len(self.points)

    def _unpack(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the content behind some points, up to the next one, by their numbers."""
        kept = {number: self._unpacked.get(number) for number in numbers}
        contents = {number: content for number, content in kept.items() if content is not None}
        missing = np.array([number for number in numbers if number not in contents], np.int64)
        low, high = self.points.packed_range(missing)
        data = self.packed.pread_many(low.tolist(), (high - low).tolist())
        for number, each in zip(missing.tolist(), data, strict=True):
            content = contents[number] = self.points.unpack(number, each)
            self._unpacked.keep(number, content, len(content))
        return contents


class JsonlSource(ItemSource):
    """The samples of a split of a JSONL file, numbered from 0.

    A sample has the part `json`, in bytes. Its key is the number of the line in the file.

    Args:
        path: The file.
        selection: Which samples to read. It may exclude `x.jsonl/17`, too.

    Raises:
        DatasetNotFoundError: If the file is missing or not indexed.
        ConfigError: If there is no such split.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self, path: str | os.PathLike[str], selection: SampleSelection = TRAIN_SPLIT
    ) -> None:
        self.lines = JsonlFile(path)
        where = self.lines.path
        split = _splits(where)
        excluded = [*split.exclude, *selection.exclude]
        warn_unmatched(
            where, describe_unmatched_lines(excluded, address_name(where), len(self.lines))
        )
        bounds = _range(split, selection.split_part, len(self.lines))
        super().__init__(where, replace(selection, exclude=excluded, parts=None), bounds=bounds)

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a line in bytes."""
        return float(self.lines.offsets[-1]) / len(self.lines)

    @property
    def slice_cost(self) -> SliceCost | None:
        """What is unpacked together; None if the file is not compressed."""
        if not isinstance(self.lines.file, UnpackedFile):
            return None
        size = self.lines.file.mean_interval
        # A slice is not aligned with points, so it spans up to three intervals.
        return SliceCost(max(1, int(size / self.mean_sample_bytes)), int(3 * size))

    def content(self) -> list[int]:
        return [len(self.lines), int(self.lines.offsets[-1])]

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the samples and their order, which a saved state must match."""
        content = {
            "lines": self.content(),
            "excluded": self.excluded.tolist(),
            "range": [self.first, self.start, self.stop],
        }
        return content_fingerprint(len(self), content)

    def items(self, numbers: Ints) -> list[Item]:
        order = np.argsort(numbers, kind="stable")
        items: list[Item] = [({}, {})] * len(numbers)
        for at, line in zip(order.tolist(), self.lines.read(numbers[order]), strict=True):
            items[at] = ({PART: line}, {})
        return items

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the samples are."""
        numbers = self.numbers(ordinals)
        order = np.argsort(numbers, kind="stable")
        file = self.lines.file
        low, high = self.lines.extents(numbers[order])
        if isinstance(file, UnpackedFile):
            yield Extents(file.packed, order, *file.packed_extents(low, high))
        else:
            yield Extents(file, order, low, high)

    def measure(self, name: str, ordinals: Ints) -> NDArray[np.float64] | None:
        """Return `bytes`, the size of lines, in the order of `ordinals`."""
        if name != "bytes":
            return None
        low, high = self.lines.extents(self.numbers(ordinals))
        return (high - low).astype(np.float64)

    def measure_names(self) -> list[str]:
        """Return the names of its measures."""
        return ["bytes"]

    @property
    def all_parts(self) -> list[str]:
        return [PART]

    def shard_of(self, number: int) -> str:
        return address_name(self.path)

    def position(self, number: int) -> tuple[str, int, int]:
        return self.shard_of(number), number, int(self.lines.offsets[number])

    def numbers_of(self, key: str) -> Sequence[int]:
        return numbers_in(key.removeprefix(f"{address_name(self.path)}/"))

    def ranges(self) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
        return ("lines", str(self.path)), {"": self.edges()}

    def _why_empty(self) -> str:
        return (
            f"split {self.split_part!r} has no samples: lines {self.first} to {self.last} of "
            f"{len(self.lines)}, {len(self.excluded)} of them excluded, subset [{self.start}, "
            f"{self.stop})"
        )


def jsonl_splits(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the splits of a JSONL file; without a file of splits, "train"."""
    return list(_splits(any_path(path)).split_parts or ["train"])


def _splits(path: AnyPath) -> JsonlSplit:
    file = any_path(jsonl_split_path(os.fspath(path)))
    text = decode_utf8(file.read_bytes(), origin=str(file)) if file.is_file() else None
    return parse_jsonl_split(text, origin=str(file))


def _range(split: JsonlSplit, split_part: str, num_lines: int) -> tuple[int, int]:
    try:
        return resolve_range(num_lines, [split.bounds(split_part)])
    except ConfigError as error:
        raise ConfigError(f"{split.origin}: split {split_part!r}: {error}") from error


class LineContents(Contents):
    """The lines of a JSONL file."""

    source: JsonlSource

    def files(self, ordinal: int) -> dict[str, BrowsedFile]:
        where = self.source.locate(ordinal)
        return {where.parts[0]: self.source.lines.browsed(where.sample)}


class JsonlKind(DatasetKind):
    """JSONL files: a JSON object in each line."""

    name = "jsonl"
    noun = "a JSONL file"
    has_files = True

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        return jsonl_splits(address)

    def open(
        self, request: OpenRequest, parts: Collection[str] | PartFilter | None = None
    ) -> JsonlSource:
        return JsonlSource(request.leaf.path, SampleSelection.of(request, parts))

    def unmatched(self, leaf: Leaf) -> list[str]:
        lines = JsonlFile(leaf.path)
        return _splits(lines.path).unmatched(address_name(lines.path), len(lines))

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        return JsonlFileStore(address)

    def browse(
        self, address: str, *, pool: ShardPool | None = None, sample_folders: bool = False
    ) -> BrowsedFolder:
        return LinesFolder(JsonlFile(address))

    def contents(self, source: JsonlSource) -> Contents:
        return LineContents(source)

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        lines = JsonlFile(address)
        splits = {}
        for name in jsonl_splits(address):
            try:
                source = JsonlSource(address, SampleSelection(name))
            except EmptyDatasetError:
                splits[name] = split_description(0, 0)
            else:
                excluded = len(source.excluded)
                splits[name] = split_description(len(source), 1, excluded=excluded)
        described = description(len(lines), 1, lines.size, splits)
        if parts:
            sizes = SizeStatistics()
            sizes.add(np.diff(lines.offsets))
            described |= PartStatistics(sizes, {PART: sizes}).to_json()
        return described


KIND = JsonlKind()
