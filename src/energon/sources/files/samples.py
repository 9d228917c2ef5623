"""Files by name: those of samples in shards, and the parts of samples of other kinds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from energon.errors import EmptyDatasetError, NoSuchFileError
from energon.formats.media import MediaMetadata, guess_extension
from energon.formats.tar.headers import split_name
from energon.io.address import redact
from energon.io.epath import any_path
from energon.io.range_file import RangeFile, open_range
from energon.io.threads import WaitingThreads
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.samples.provenance import SourceInfo
from energon.sources.files.locate import FileRange, LazyLocator, MediaLookup
from energon.sources.files.store import FileStore, StoreFile
from energon.sources.shards import ShardPool, read_spans
from energon.sources.source import OpenRequest, Source
from energon.sources.tree import BrowsedFile, Contents

MAX_PARALLEL_FILES = 32
"""Shards read at the same time; several ranges may be requested from each."""


def read_file_ranges(file_ranges: Sequence[FileRange]) -> list[bytes]:
    """Return the contents of ranges, in their order."""
    by_file: defaultdict[RangeFile, list[int]] = defaultdict(list)
    for number, file_range in enumerate(file_ranges):
        by_file[file_range.file].append(number)
    contents = [b""] * len(file_ranges)

    def read(file: RangeFile, numbers: list[int]) -> None:
        chosen = [file_ranges[number] for number in numbers]
        for number, content in zip(numbers, _read_file(file, chosen), strict=True):
            contents[number] = content

    if len(by_file) > 1 and file_ranges[0].file.is_remote:  # as are all of a dataset
        _together(read, by_file.items())
    else:
        for file, numbers in by_file.items():
            read(file, numbers)
    return contents


def _together(
    read: Callable[[RangeFile, list[int]], None], work: Collection[tuple[RangeFile, list[int]]]
) -> None:
    """Call `read` for each item of `work`, in threads that wait for answers."""
    threads = WaitingThreads(min(MAX_PARALLEL_FILES, len(work)), "energon-files")
    futures = [threads.submit(read, *item) for item in work]
    threads.close()
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _read_file(file: RangeFile, file_ranges: Sequence[FileRange]) -> Iterable[bytes]:
    """Return the contents of ranges of one file."""
    if len(file_ranges) == 1:  # as for random names, where planning costs more than reading
        return [file.pread(file_ranges[0].offset, file_ranges[0].size)]
    order = sorted(range(len(file_ranges)), key=lambda number: file_ranges[number].offset)
    low = np.array([file_ranges[number].offset for number in order], np.int64)
    size = np.array([file_ranges[number].size for number in order], np.int64)
    buffers, begin = read_spans(file, low, low + size)
    contents = [b""] * len(file_ranges)
    bounds = zip(order, buffers, (low - begin).tolist(), size.tolist(), strict=True)
    for number, buffer, start, count in bounds:
        contents[number] = buffer[start : start + count]
    return contents


class WebdatasetFileStore(FileStore[bytes]):
    """The files of a prepared dataset of tar shards, by their names in the shards.

    Files of all splits are found, including those of excluded samples.

    Args:
        dataset_path: Folder of the dataset.
        pool: Opens shards; None makes a pool.
    """

    def __init__(
        self, dataset_path: str | os.PathLike[str], *, pool: ShardPool | None = None
    ) -> None:
        self.path = any_path(dataset_path)
        self._media = MediaLookup(self.path)
        self._locator = LazyLocator(self.path, ShardPool() if pool is None else pool)

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        file_range = self._range(name)
        return file_range.file.pread(file_range.offset, file_range.size), self._source(
            name, file_range
        )

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        file_ranges = [self._range(name) for name in names]
        return [
            (content, self._source(name, file_range))
            for name, file_range, content in zip(
                names, file_ranges, read_file_ranges(file_ranges), strict=True
            )
        ]

    def open(self, name: str) -> IO[bytes]:
        file_range = self._range(name)
        file = open_range(file_range.file, file_range.offset, file_range.size)
        return StoreFile(file, self, name, is_remote=file_range.file.is_remote)

    def get_size(self, name: str) -> int:
        return self._range(name).size

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self._media.get(key)

    def get_path(self) -> str:
        return str(self.path)

    def names(self) -> Iterator[str]:
        """Yield the names of all files, in the order of the dataset."""
        return self._locator.get().names()

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> FileRange | None:
        parts = split_name(name)
        return None if parts is None else self._locator.get().find(*parts)

    def _range(self, name: str) -> FileRange:
        file_range = self._find(name)
        if file_range is None:
            raise NoSuchFileError(
                f"{name!r} is not in dataset {self.path}; files have the same names as in "
                "the shards, as `energon mount` shows them"
            )
        return file_range

    def _source(self, name: str, file_range: FileRange) -> SourceInfo:
        return SourceInfo(str(self.path), name, file_range.shard, (name,))


class OpensSamples(Protocol):
    """The operations of a kind that a store of the parts of its samples needs."""

    def split_names(
        self, address: str, split_config: str | None = None, allow: Collection[str] = ()
    ) -> list[str]:
        """Return the names of the splits of a dataset."""

    def config(self, leaf: Leaf) -> DatasetConfig:
        """Return the configuration of its samples."""

    def open(self, request: OpenRequest) -> Source:
        """Return the samples of a leaf."""

    def contents(self, source: Any) -> Contents:
        """Return the parts of the samples of a source."""


class SampleFileStore(FileStore[bytes]):
    """The parts of the samples of a dataset, by the names `KEY.PART`.

    Bytes are files as they are. Texts, arrays and other values are the files `KEY.PART.txt`, `.npy`
    and `.json`, which are also found without that suffix. Samples of all splits are found; if two
    splits have samples of one key, those of the first.

    Args:
        kind: The kind of the dataset.
        address: Its path or address.
        pool: Opens shards; None makes a pool.
        allow: What the data may do, see `get_train_dataset`.
    """

    def __init__(
        self,
        kind: OpensSamples,
        address: str | os.PathLike[str],
        *,
        pool: ShardPool | None = None,
        allow: Collection[str] = (),
    ) -> None:
        self.kind = kind
        self.address = os.fspath(address)
        self._pool = pool
        self._allow = allow
        if not self._splits:
            raise EmptyDatasetError(f"{redact(self.address)}: has no samples")

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SampleFileStore, allow=self._allow), (self.kind, self.address)

    def get_raw(self, name: str) -> tuple[bytes, SourceInfo]:
        part = self._find(name)
        return part.file.read(), SourceInfo(self.get_path(), name, part.shard, (name,))

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        located = [self._locate(name) for name in names]
        for split in self._splits:
            split.contents.read_ahead([number for own, number, _ in located if own is split])
        return [self.get_raw(name) for name in names]

    def get_size(self, name: str) -> int:
        return self._find(name).file.size

    def get_path(self) -> str:
        return redact(self.address)

    def decoded_name(self, name: str, data: bytes) -> str:
        own = self._find(name).name
        extension = None if "." in own else guess_extension(data)
        return f"{own}.{extension}" if extension else own

    @cached_property
    def _splits(self) -> list[_Split]:
        splits = []
        kind, allow = self.kind, self._allow
        for name in kind.split_names(self.address, allow=allow):
            leaf = Leaf(self.address, name, origin=redact(self.address))
            try:
                source = kind.open(
                    OpenRequest(leaf, kind.config(leaf), pool=self._pool, allow=allow)
                )
            except EmptyDatasetError:
                continue
            splits.append(_Split(source, kind.contents(source)))
        return splits

    def _locate(self, name: str) -> tuple[_Split, int, str]:
        """Return the split and number of the sample that a file belongs to, and its part."""
        key, part = split_name(name) or ("", "")
        for split in self._splits:
            for number in split.source.find(key):
                return split, number, part
        example = self._splits[0].source.locate(0)
        raise NoSuchFileError(
            f"{name!r} is not in {self.get_path()}: it has no sample {key!r}; names consist of key "
            f"and part, such as '{example.key}.{example.parts[0]}'"
        )

    def _find(self, name: str) -> _PartFile:
        split, number, part = self._locate(name)
        files = split.contents.files(number)
        own = part if part in files else _same_file(part, files)
        if own is None:
            raise NoSuchFileError(
                f"{name!r} is not in {self.get_path()}: its sample has the files {', '.join(files)}"
            )
        return _PartFile(own, files[own], split.source.locate(number).shard)


def _same_file(part: str, files: Iterable[str]) -> str | None:
    """Return the file that has the name of a part but for a suffix of either."""
    stem = part.rpartition(".")[0]
    return next((each for each in files if each == stem or each.rpartition(".")[0] == part), None)


class _Split(NamedTuple):
    source: Source
    contents: Contents


class _PartFile(NamedTuple):
    name: str
    """The file, as it is called in its sample."""
    file: BrowsedFile
    shard: str
