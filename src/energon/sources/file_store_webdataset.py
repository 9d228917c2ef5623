"""The files of a prepared WebDataset, by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import IO

from energon.errors import NoSuchFileError
from energon.formats.media import MediaMetadata
from energon.formats.tar import split_name
from energon.io.epath import any_path
from energon.io.range_stream import open_range
from energon.samples.source_info import SourceInfo
from energon.sources.file_store import FileStore
from energon.sources.file_store_locate import FilePlace, LazyLocator
from energon.sources.file_store_media import MediaLookup
from energon.sources.file_store_read import read_places
from energon.sources.shards import ShardPool
from energon.sources.store_file import StoreFile


class WebdatasetFileStore(FileStore[bytes]):
    """The files of a prepared dataset of tar shards, by their names in the shards.

    Files of all splits are found, those of excluded samples, too.

    Args:
        dataset_path: Folder of the dataset.
        pool: Where shards are opened; None makes one.
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

    def get_media_metadata(self, name: str) -> MediaMetadata:
        return self._media.get(name)

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
                f"{name!r} is not in dataset {self.path}; files have the names that they have in "
                "the shards, as `energon mount` shows them"
            )
        return place

    def _source(self, name: str, place: FilePlace) -> SourceInfo:
        return SourceInfo(str(self.path), name, place.shard, (name,))
