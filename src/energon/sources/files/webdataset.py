"""The files of a prepared WebDataset, by name."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import IO

import numpy as np

from energon.errors import NoSuchFileError
from energon.formats.media import MediaMetadata
from energon.formats.tar.names import split_name
from energon.io.epath import any_path
from energon.io.range_file import RangeFile, open_range
from energon.io.threads import WaitingThreads
from energon.samples.provenance import SourceInfo
from energon.sources.files.locate import FilePlace, LazyLocator, MediaLookup
from energon.sources.files.store import FileStore, StoreFile
from energon.sources.shards import ShardPool, read_spans

MAX_PARALLEL_FILES = 32
"""Shards read at the same time; several ranges may be requested from each."""


def read_places(places: Sequence[FilePlace]) -> list[bytes]:
    """Return the content of each of `places`, in their order."""
    by_file: defaultdict[RangeFile, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        by_file[place.file].append(number)
    contents = [b""] * len(places)

    def read(file: RangeFile, numbers: list[int]) -> None:
        chosen = [places[number] for number in numbers]
        for number, content in zip(numbers, _read_file(file, chosen), strict=True):
            contents[number] = content

    if len(by_file) > 1 and places[0].file.is_remote:  # as are all of a dataset
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


def _read_file(file: RangeFile, places: Sequence[FilePlace]) -> Iterable[bytes]:
    """Return the contents of `places`, which are in one file."""
    if len(places) == 1:  # as for random names, where planning costs more than reading
        return [file.pread(places[0].offset, places[0].size)]
    order = sorted(range(len(places)), key=lambda number: places[number].offset)
    low = np.array([places[number].offset for number in order], np.int64)
    size = np.array([places[number].size for number in order], np.int64)
    buffers, begin = read_spans(file, low, low + size)
    found = [b""] * len(places)
    bounds = zip(order, buffers, (low - begin).tolist(), size.tolist(), strict=True)
    for number, buffer, start, count in bounds:
        found[number] = buffer[start : start + count]
    return found


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
        place = self._place(name)
        return place.file.pread(place.offset, place.size), self._source(name, place)

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        places = [self._place(name) for name in names]
        return [
            (content, self._source(name, place))
            for name, place, content in zip(names, places, read_places(places), strict=True)
        ]

    def open(self, name: str) -> IO[bytes]:
        place = self._place(name)
        file = open_range(place.file, place.offset, place.size)
        return StoreFile(file, self, name, is_remote=place.file.is_remote)

    def get_size(self, name: str) -> int:
        return self._place(name).size

    def get_media_metadata(self, key: str) -> MediaMetadata:
        return self._media.get(key)

    def get_path(self) -> str:
        return str(self.path)

    def names(self) -> Iterator[str]:
        """Yield the names of all files, in the order of the dataset."""
        return self._locator.get().names()

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def _find(self, name: str) -> FilePlace | None:
        parts = split_name(name)
        return None if parts is None else self._locator.get().find(*parts)

    def _place(self, name: str) -> FilePlace:
        place = self._find(name)
        if place is None:
            raise NoSuchFileError(
                f"{name!r} is not in dataset {self.path}; files have the same names as in "
                "the shards, as `energon mount` shows them"
            )
        return place

    def _source(self, name: str, place: FilePlace) -> SourceInfo:
        return SourceInfo(str(self.path), name, place.shard, (name,))
