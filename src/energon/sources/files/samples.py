"""The parts of samples as files by name, for datasets whose kind has no files of its own."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

from energon.errors import EmptyDatasetError, NoSuchFileError
from energon.formats.media import guess_extension
from energon.formats.tar.names import split_name
from energon.io.address import redact
from energon.metadataset.dataset_config import DatasetConfig
from energon.metadataset.leaf import Leaf
from energon.samples.provenance import SourceInfo
from energon.sources.browse.tree import BrowsedFile, Contents
from energon.sources.files.store import FileStore
from energon.sources.shards import ShardPool
from energon.sources.source import OpenRequest, Source


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
        found = self._find(name)
        return found.file.read(), SourceInfo(self.get_path(), name, found.shard, (name,))

    def get_many_raw(self, names: Sequence[str]) -> list[tuple[bytes, SourceInfo]]:
        places = [self._locate(name) for name in names]
        for split in self._splits:
            split.contents.read_ahead([number for own, number, _ in places if own is split])
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
        found = []
        kind, allow = self.kind, self._allow
        for name in kind.split_names(self.address, allow=allow):
            leaf = Leaf(self.address, name, origin=redact(self.address))
            try:
                source = kind.open(
                    OpenRequest(leaf, kind.config(leaf), pool=self._pool, allow=allow)
                )
            except EmptyDatasetError:
                continue
            found.append(_Split(source, kind.contents(source)))
        return found

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

    def _find(self, name: str) -> _Found:
        split, number, part = self._locate(name)
        files = split.contents.files(number)
        own = part if part in files else _same_file(part, files)
        if own is None:
            raise NoSuchFileError(
                f"{name!r} is not in {self.get_path()}: its sample has the files {', '.join(files)}"
            )
        return _Found(own, files[own], split.source.locate(number).shard)


def _same_file(part: str, files: Iterable[str]) -> str | None:
    """Return the file that has the name of a part but for a suffix of either."""
    stem = part.rpartition(".")[0]
    return next((each for each in files if each == stem or each.rpartition(".")[0] == part), None)


class _Split(NamedTuple):
    source: Source
    contents: Contents


class _Found(NamedTuple):
    name: str
    """The file, as it is called in its sample."""
    file: BrowsedFile
    shard: str
