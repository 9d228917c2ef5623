"""Read folders of images, audio and video as samples, with the files that belong to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, ShardChangedError
from energon.formats.meta.split import BY_NAMES, chosen_split, ratio_range
from energon.formats.tar.names import split_name
from energon.io.address import join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.epath import any_path
from energon.io.files import open_store
from energon.io.range_file import RemoteFile
from energon.io.ranges import span_buffer
from energon.local_file import read_file
from energon.sources.files.open import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.kinds import description, split_description
from energon.sources.media.media_files import MediaFiles, note_listing
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import ShardPool
from energon.sources.source import Extents
from energon.sources.tables.row_kind import Item, ItemSource, RowKind, RowOptions


@dataclass(frozen=True)
class FolderOptions(RowOptions):
    """The options under `read` in a document for a folder of media files.

    Args:
        labels: Whether samples have the parts `label` and `label_name`, the number and name of the
            folder that they are in; None if they are all in folders side by side.
    """

    labels: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels not in (None, True, False):
            raise ConfigError(
                f"{self.origin}: read: labels is {self.labels!r}; expected true or false"
            )


class MediaFolderSource(ItemSource):
    """The samples of a split of a folder of media files.

    A sample has a part for each of its files, named by their extensions, and for each fact from
    tables or class names. Its key is its path below the folder.

    Args:
        address: The folder.
        split_part: The split to read.
        options: The options in the document.
        parts: Parts to read unless `options` name them; None for all.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys of excluded samples, or names of files.

    Raises:
        ConfigError: If there is no such split or part.
        EmptyDatasetError: If no sample is left.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: FolderOptions | None = None,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        options = options or FolderOptions(origin=redact(address))
        self.media = MediaFiles(os.fspath(address), labels=options.labels)
        self.chosen = _split_numbers(self.media, options, split_part)
        self._split = (split_part, options.split or "")
        super().__init__(
            any_path(address),
            split_part=split_part,
            bounds=(0, len(self.chosen)),
            columns=options.columns,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of the files of a sample in bytes."""
        sizes = self.media.sizes
        some = self.chosen[:: max(1, len(self.chosen) // 1000)].tolist()
        files = [name for n in some for name in self.media.parts[n].values()]
        return max(1.0, sum(sizes[name].size for name in files) / len(some))

    @property
    def number_space(self) -> tuple[str, ...]:
        return ("files", str(self.path), *self._split)

    @property
    def all_parts(self) -> list[str]:
        own = dict.fromkeys(part for parts in self.media.parts for part in parts)
        said = dict.fromkeys(name for row in self.media.rows.values() for name in row)
        labels = () if self.media.classes is None else ("label", "label_name")
        return [*own, *said, *labels]

    def key_of(self, number: int) -> str:
        return self.media.keys[int(self.chosen[number])]

    def numbers_of(self, key: str) -> Sequence[int]:
        keys = [key] if key in self._places else [(split_name(key) or ("", ""))[0]]
        return [self._places[each] for each in keys if each in self._places]

    def shard_of(self, number: int) -> str:
        return self._first_file(number)

    def position(self, number: int) -> tuple[str, int, int]:
        return self._first_file(number), 0, 0

    def content(self) -> Any:
        digest = blake2b(digest_size=8)
        for number in self.chosen.tolist():
            for name in self.media.parts[number].values():
                digest.update(os.fsencode(f"{name}\0{self.media.sizes[name].size}\0"))
        return [digest.hexdigest(), self.media.classes]

    def items(self, numbers: Ints) -> list[Item]:
        media = self.media
        keys = [self.key_of(number) for number in numbers.tolist()]
        names = [
            {p: f for p, f in media.parts[int(self.chosen[n])].items() if self.takes(p)}
            for n in numbers.tolist()
        ]
        contents = iter(self._read([file for own in names for file in own.values()]))
        found: list[tuple[dict[str, Any], dict[str, str]]] = []
        for key, own in zip(keys, names, strict=True):
            parts: dict[str, Any] = {part: next(contents) for part in own}
            more = dict(media.rows.get(key, {}))
            if media.classes is not None:
                name = media.label_of(key)
                more |= {"label": media.classes[name], "label_name": name}
            parts |= {part: value for part, value in more.items() if self.takes(part)}
            found.append((parts, {}))
        return found

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the files of samples in a store are, each as a whole."""
        if not self.is_remote:
            return
        for place, number in enumerate(self.numbers(ordinals).tolist()):
            for part, name in self.media.parts[int(self.chosen[number])].items():
                size = self.media.sizes[name].size
                if self.takes(part) and size:
                    bounds = np.array([0]), np.array([size])
                    yield Extents(self._remote(name), np.array([place]), *bounds)

    @cached_property
    def _places(self) -> dict[str, int]:
        keys = (self.media.keys[n] for n in self.chosen.tolist())
        return {key: place for place, key in enumerate(keys)}

    def _first_file(self, number: int) -> str:
        return next(iter(self.media.parts[int(self.chosen[number])].values()))

    def _read(self, names: Sequence[str]) -> list[bytes]:
        if not self.is_remote:
            return [self._read_local(name) for name in names]
        objects = [self._remote(name).object for name in names]
        buffer = span_buffer()
        found = [buffer.find(each, 0, each.info.size) for each in objects]
        missing = [n for n, content in enumerate(found) if content is None]
        if missing:
            store = objects[0].store
            read = [(objects[n],) for n in missing]
            answers = store.together(lambda each: each.read(0, each.info.size), read)
            for n, content in zip(missing, answers, strict=True):
                found[n] = content
        return [content or b"" for content in found]

    def _read_local(self, name: str) -> bytes:
        path = os.path.join(self.media.address, name)
        try:
            return read_file(path)
        except OSError as error:
            raise ShardChangedError(
                f"{path}: cannot be read ({error.strerror or error}), but existed when the folder "
                "was listed; restore it, or start again without it"
            ) from error

    def _remote(self, name: str) -> RemoteFile:
        address = join_address(self.media.address, name)
        listed = self.media.sizes[name]
        _, key = open_store(address)
        return RemoteFile(address, info=ObjectInfo(key, listed.size, listed.version))


def _split_numbers(media: MediaFiles, options: FolderOptions, split_part: str) -> Ints:
    """Return which of all samples belong to a split, ascending."""
    origin = options.origin or redact(media.address)
    splits = media.splits
    if options.split is not None or "" in splits:
        low, high = ratio_range(
            options.split, split_part, len(media.keys), what="samples", origin=origin
        )
        if options.split is None:
            return np.arange(low, high)
        # Samples of a class are adjacent, and each split should have some of each class.
        digests = [blake2b(os.fsencode(key), digest_size=8).digest() for key in media.keys]
        order = sorted(range(len(digests)), key=digests.__getitem__)
        return np.array(sorted(order[low:high]), np.int64)
    own = set(splits[chosen_split(split_part, splits, origin=redact(media.address), by=BY_NAMES)])
    return np.array([n for n, key in enumerate(media.keys) if key in own], np.int64)


class MediaFolderKind(RowKind):
    """Folders of images, audio and video."""

    name = "folder"
    noun = "a folder of media files"
    has_files = True
    source = MediaFolderSource
    options_type = FolderOptions
    options = FolderOptions.names()
    hint = (
        "files are read one by one from the folder; `energon pack` writes them to tar shards, "
        "which load faster from stores and network disks"
    )

    def prepare(self, address: str) -> int:
        note_listing(address)
        return len(MediaFiles(address).keys)

    def splits_of(self, address: str) -> Collection[str]:
        return MediaFiles(address).splits

    def file_store(
        self, address: str, *, pool: ShardPool | None = None, allow: Collection[str] = ()
    ) -> FileStore[bytes]:
        return SystemFileStore(address)

    def browse(self, address: str, **_: Any) -> Any:
        raise ConfigError(f"{redact(address)} is a folder already and needs no mounting")

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        media = MediaFiles(address)
        splits = {}
        for name in self.split_names(address):
            chosen = _split_numbers(media, FolderOptions(), name).tolist()
            files = sum(len(media.parts[n]) for n in chosen)
            splits[name] = split_description(len(chosen), files)
        names = [file for own in media.parts for file in own.values()]
        size = sum(media.sizes[name].size for name in names)
        about = description(len(media.keys), len(names), size, splits)
        return {**about, "classes": media.classes or {}}


KIND = MediaFolderKind()
