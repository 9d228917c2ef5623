"""Read datasets of MosaicML Streaming (MDS) and LitData directly, without these libraries.

Both are folders of chunks listed in an `index.json`. Records of uncompressed chunks are read one by
one; compressed chunks are decompressed as a whole, once per slice.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from energon.arrays import Ints, distinct
from energon.errors import ConfigError, DatasetNotFoundError, FormatError, StorageError
from energon.formats.chunks.litdata import LitDataFormat
from energon.formats.chunks.mds import MdsFormat
from energon.formats.chunks.records import (
    CHUNK_INDEX,
    COUNT_BYTES,
    ChunkFormat,
    check_num_records,
    count_of,
    record_edges,
)
from energon.formats.json_text import parse_json
from energon.formats.meta.split import SPLIT_WORDS, find_split, ratio_range
from energon.io.address import is_remote, join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile
from energon.io.epath import any_path
from energon.io.files import is_file, list_files, open_store, read_document
from energon.io.range_file import RemoteFile
from energon.sources.decoded_blocks import DecodedBlocks, SliceCost
from energon.sources.kinds import Extents, description, split_description
from energon.sources.shard_samples import PartFilter
from energon.sources.shards import read_spans
from energon.sources.tables.row_kind import ItemSource, RowKind, RowOptions, file_of_part
from energon.utf8 import decode_utf8

ASSUMED_RATIO = 4
"""Bytes of records to those of the packed chunk, where slices are planned."""
OPEN_CHUNK_FILES = 64
KNOWN_CHUNKS = 256
"""Chunks whose offsets are kept."""


def split_folders(address: str) -> dict[str, str]:
    """Return the folder of each split, by its name; without splits, there is one called "".

    Raises:
        DatasetNotFoundError: If there is no index.
    """
    if is_file(join_address(address, CHUNK_INDEX)):
        return {"": address}
    places = {name: join_address(address, name) for name in SPLIT_WORDS}
    found = {name: at for name, at in places.items() if is_file(join_address(at, CHUNK_INDEX))}
    if not found:
        raise DatasetNotFoundError(f"{redact(address)}: there is no {CHUNK_INDEX} in it")
    return found


def _folder_of(split_part: str, folders: Mapping[str, str], origin: str) -> str:
    """Return the folder of a split, which may have another of its usual names."""
    found = find_split(split_part, folders)
    if found is None:
        found = next((name for name in folders if SPLIT_WORDS[name] == split_part), None)
    if found is None:
        raise ConfigError(f"{origin}: there is no split {split_part!r}, only {', '.join(folders)}")
    return folders[found]


def read_index(folder: str) -> Any:
    """Return the content of a folder's index."""
    path = join_address(folder, CHUNK_INDEX)
    text = decode_utf8(read_document(path), origin=redact(path))
    return parse_json(text, origin=redact(path), hint="copy the folder again, or rewrite it")


class ChunkSource(ItemSource):
    """The records of a split, numbered from 0. Their keys are their numbers, in nine digits.

    Args:
        address: The folder, or one with a folder for each split.
        split_part: The split to read.
        options: The options in the document.
        parts: Parts to read unless `options` name them; None for all.
        subsets: Ranges that narrow the split, see `energon.plan.leaves.subset`.
        exclude: Keys of excluded samples.

    Raises:
        DatasetNotFoundError: If there is no index.
        FormatError: If the index is invalid.
        ConfigError: If there is no such split, or records have an unknown encoding.
        EmptyDatasetError: If no sample is left.
    """

    format_type: ClassVar[type[MdsFormat] | type[LitDataFormat]]

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        split_part: str = "train",
        options: RowOptions | None = None,
        parts: Collection[str] | PartFilter | None = None,
        subsets: Sequence[Any] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        options = options or RowOptions(origin=redact(address))
        self._reopen = partial(
            type(self),
            os.fspath(address),
            split_part=split_part,
            options=options,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )
        origin = options.origin or redact(address)
        folders = split_folders(os.fspath(address))
        self.folder = folders.get("") or _folder_of(split_part, folders, redact(address))
        index = redact(join_address(self.folder, CHUNK_INDEX))
        self.format: ChunkFormat = self.format_type(read_index(self.folder), index)
        self.columns = self.format.columns
        self.files = self.format.chunks
        self.ends = np.array([0, *accumulate(file.num_records for file in self.files)], np.int64)
        total = int(self.ends[-1])
        bounds = (0, total)
        if "" in folders:
            bounds = ratio_range(options.split, split_part, total, what="samples", origin=origin)
        self._open: OrderedDict[int, RemoteFile | OpenFile] = OrderedDict()
        self._edges: OrderedDict[int, Ints] = OrderedDict()
        self._unpacked: DecodedBlocks[int, list[Sized]] = DecodedBlocks()
        super().__init__(
            any_path(address),
            split_part=split_part,
            bounds=bounds,
            columns=options.columns,
            parts=parts,
            subsets=subsets,
            exclude=exclude,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    @property
    def is_packed(self) -> bool:
        """Whether chunks are decompressed as a whole, before a record can be read."""
        return self.format.is_packed

    @property
    def mean_sample_bytes(self) -> float:
        """Average size of a record in bytes."""
        return sum(file.size for file in self.files) / max(1, int(self.ends[-1]))

    @property
    def slice_cost(self) -> SliceCost | None:
        """A packed chunk is decompressed as a whole; None if single records are read."""
        if not self.is_packed:
            return None
        blocks = self.samples_between(self.ends)
        # A slice that is not aligned with chunks is in two of them.
        size = (1 if blocks else 2) * ASSUMED_RATIO * max(file.size for file in self.files)
        rows = int(np.median([file.num_records for file in self.files]))
        return SliceCost(max(1, rows), size, blocks)

    @property
    def place(self) -> tuple[str, ...]:
        return ("records", self.folder)

    @property
    def all_parts(self) -> list[str]:
        return [name for name in self.columns if not name.startswith("__")]

    def key_of(self, number: int) -> str:
        return f"{number:09}"

    def shard_of(self, number: int) -> str:
        return self.files[self._file_of(number)].name

    def position(self, number: int) -> tuple[str, int, int]:
        at = self._file_of(number)
        own = number - int(self.ends[at])
        offset = 0 if self.is_packed else int(self._offsets(at)[own])
        return self.files[at].name, own, offset

    def content(self) -> Any:
        return [list(file) for file in self.files]

    def items(self, numbers: Ints) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        found: list[Any] = [None] * len(numbers)
        for file, order in self._by_file(numbers):
            origin = self._origin(file)
            records = self._records(file, numbers[order] - self.ends[file])
            for place, record in zip(order.tolist(), records, strict=True):
                found[place] = self._item(file, record, origin)
        return found

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the records of samples are; of packed chunks, the whole chunk."""
        numbers = self.numbers(ordinals)
        for file, order in self._by_file(numbers):
            if self.is_packed:
                low = np.zeros(len(order), np.int64)
                high = np.full(len(order), self._size(file), np.int64)
            else:
                edges, own = self._offsets(file), numbers[order] - self.ends[file]
                low, high = edges[own], edges[own + 1]
            yield Extents(self._range_file(file), order, low, high)

    def _by_file(self, numbers: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield the chunks that records are in, and the places of their records, in file order."""
        at = np.searchsorted(self.ends, numbers, side="right") - 1
        files = distinct(at).tolist()
        self._fetch_heads(files)
        for file in files:
            places = np.flatnonzero(at == file)
            yield file, places[np.argsort(numbers[places], kind="stable")]

    def _item(self, file: int, record: Sized, origin: str) -> tuple[dict[str, Any], dict[str, Any]]:
        parts: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for name, value in self.format.row(file, record, origin, self._is_read).items():
            parts[name], found = _encoded(name, value)
            if found is not None:
                files[name] = found
        return parts, files

    def _is_read(self, name: str) -> bool:
        return self.takes(name) and not name.startswith("__")

    def _records(self, file: int, own: Ints) -> Sequence[Sized]:
        """Return records of a chunk, given ascending numbers."""
        if self.is_packed:
            chunk = self._chunk(file)
            return [chunk[number] for number in own.tolist()]
        edges = self._offsets(file)
        low, high = edges[own], edges[own + 1]
        buffers, begin = read_spans(self._range_file(file), low, high)
        bounds = zip(buffers, (low - begin).tolist(), (high - begin).tolist(), strict=True)
        origin = self._origin(file)
        one = self.format.record
        return [one(memoryview(data)[start:stop], origin) for data, start, stop in bounds]

    def _chunk(self, file: int) -> list[Sized]:
        """Return the records of a packed chunk; kept for as long as there is memory."""
        found = self._unpacked.get(file)
        if found is None:
            data = self._range_file(file).pread(0, self._size(file))
            self._check_size(file)
            origin = self._origin(file)
            found = list(self.format.records(file, data, origin))
            check_num_records(len(found), self.files[file].num_records, origin)
            self._unpacked.keep(file, found, sum(map(len, found)))
        return found

    def _offsets(self, file: int) -> Ints:
        """Return where the records of a chunk begin, and the end of the last one.

        Raises:
            FormatError: If the chunk is damaged, or not the one in the index.
        """
        if file not in self._edges:
            self._note_edges(file, self._range_file(file).pread(0, self._head_bytes(file)))
        return self._edges[file]

    def _fetch_heads(self, files: Sequence[int]) -> None:
        """Fetch the offsets of several chunks in a store at once."""
        missing = [file for file in files if file not in self._edges][:KNOWN_CHUNKS]
        if self.is_packed or not self.is_remote or len(missing) < 2:
            return
        asked = [(self._range_file(file), self._head_bytes(file)) for file in missing]
        store, _ = open_store(self.folder)
        heads = store.together(lambda file, size: file.pread(0, size), asked)
        for file, head in zip(missing, heads, strict=True):
            self._note_edges(file, head)

    def _head_bytes(self, file: int) -> int:
        head = COUNT_BYTES + 4 * (self.files[file].num_records + 1)
        # An index may claim any number of records; a store is not asked for the size first.
        return head if self.is_remote else min(head, self._size(file))

    def _note_edges(self, file: int, head: bytes) -> None:
        count, origin = self.files[file].num_records, self._origin(file)
        self._check_size(file)
        check_num_records(count_of(head), count, origin)
        self._edges[file] = record_edges(head[COUNT_BYTES:], count, self._size(file), origin)
        if len(self._edges) > KNOWN_CHUNKS:
            self._edges.popitem(last=False)

    def _range_file(self, file: int) -> RemoteFile | OpenFile:
        found = self._open.get(file)
        if found is None:
            address = join_address(self.folder, self.files[file].name)
            if is_remote(address):
                found = RemoteFile(address, info=self._listed.get(self.files[file].name))
            else:
                found = OpenFile(address)
            self._open[file] = found
            if len(self._open) > OPEN_CHUNK_FILES:
                self._open.popitem(last=False)
        return found

    @cached_property
    def _listed(self) -> dict[str, ObjectInfo]:
        """The chunks in a store by name, where it can list them: one request instead of many."""
        _, folder = open_store(self.folder)
        try:
            listed = list_files(self.folder)
        except StorageError:
            return {}
        return {each.key: each._replace(key=f"{folder}/{each.key}".lstrip("/")) for each in listed}

    def _size(self, file: int) -> int:
        found = self._range_file(file)
        if isinstance(found, RemoteFile):
            return found.info.size
        return os.fstat(found.descriptor).st_size

    def _check_size(self, file: int) -> None:
        size, stated = self._size(file), self.files[file].size
        if self.format.sizes_are_exact and size != stated:
            raise FormatError(
                f"{self._origin(file)}: has {size} bytes, but {CHUNK_INDEX} says {stated}; it is "
                "incomplete or was replaced, copy the folder again"
            )

    def _origin(self, file: int) -> str:
        return redact(join_address(self.folder, self.files[file].name))

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self.ends, number, side="right")) - 1


def _encoded(name: str, value: Any) -> tuple[Any, Any]:
    """Return a part with its images as files, and their names where its own does not tell."""
    if isinstance(value, list) and value and (isinstance(value[0], bytes) or _is_image(value[0])):
        pairs = [_encoded(name, each) for each in value]
        contents, files = ([pair[at] for pair in pairs] for at in (0, 1))
        is_decoded = any(files) and all(isinstance(each, bytes) for each in contents)
        return contents, files if is_decoded else None
    if _is_image(value):
        content, extension = _lossless(value)
        return content, f"{name}.{extension}"
    return value, file_of_part(name, value)


def _is_image(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")


def _lossless(image: Any) -> tuple[bytes, str]:
    """Return a Pillow image as a lossless file, and its extension."""
    if image.mode in ("RGB", "L"):
        kind, extension = ("P6", "ppm") if image.mode == "RGB" else ("P5", "pgm")
        return f"{kind}\n{image.width} {image.height}\n255\n".encode() + image.tobytes(), extension
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue(), "png"


class MdsRecords(ChunkSource):
    """The samples of a dataset of MosaicML Streaming; see `ChunkSource`."""

    format_type = MdsFormat


class LitDataRecords(ChunkSource):
    """The items of a dataset optimized by LitData; see `ChunkSource`."""

    format_type = LitDataFormat


class ChunkKind(RowKind):
    """Folders of chunks.

    Args:
        name: Its name in documents and reports.
        noun: What such a dataset is, for messages.
        source: Reads its samples.
    """

    source: type[ChunkSource]

    def __init__(self, name: str, noun: str, source: type[ChunkSource]) -> None:
        self.name = name
        self.noun = noun
        self.source = source

    def splits_of(self, address: str) -> Collection[str]:
        return split_folders(address)

    def describe(
        self,
        address: str,
        *,
        split_config: str = "split.yaml",
        dataset_config: str = "dataset.yaml",
        parts: bool = True,
    ) -> dict[str, Any]:
        sources = {n: self.source(address, split_part=n) for n in self.split_names(address)}
        splits = {
            name: split_description(len(source), len(source.files))
            for name, source in sources.items()
        }
        samples = sum(len(source) for source in sources.values())
        files = [file for source in sources.values() for file in source.files]
        about = description(samples, len(files), sum(file.size for file in files), splits)
        return {**about, "columns": next(iter(sources.values())).columns}


MDS = ChunkKind("mds", "a dataset of MosaicML Streaming", MdsRecords)
LITDATA = ChunkKind("litdata", "a dataset of LitData", LitDataRecords)
