"""Read datasets of MosaicML Streaming (MDS) and LitData directly, without these libraries.

Both are folders of chunks and of an `index.json` that lists these.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence, Sized
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from energon.arrays import Ints, distinct
from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DecodeError,
    FormatError,
    StorageError,
)
from energon.formats.meta.info import (
    BY_NAMES,
    SPLIT_WORDS,
    chosen_split,
    guess_splits,
    ratio_range,
)
from energon.formats.text import parse_json
from energon.io.address import is_remote, join_address, local_path, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile, folder_entries
from energon.io.epath import any_path
from energon.io.files import is_file, list_files, open_store, read_bytes, read_document
from energon.io.range_file import RemoteFile, range_file
from energon.local_file import decode_utf8
from energon.sources.decoded_blocks import DecodedBlocks, SliceCost
from energon.sources.kinds import description, split_description
from energon.sources.shards import read_spans
from energon.sources.source import TRAIN_SPLIT, Extents, SampleSelection
from energon.sources.tables.row_kind import (
    Item,
    ItemSource,
    RowKind,
    RowOptions,
    file_of_part,
)
from energon_mds.litdata import LitDataFormat
from energon_mds.mds import MdsFormat
from energon_mds.records import (
    CHUNK_INDEX,
    COUNT_BYTES,
    ChunkFormat,
    check_num_records,
    count_of,
    record_edges,
)

KNOWN_CHUNKS = 256
"""Chunks whose offsets are kept."""


class ChunkFiles:
    """The chunks of a folder, numbered from 0.

    Records of uncompressed chunks are read one by one; compressed ones are decompressed as a whole,
    and kept for as long as there is memory.

    Args:
        folder: Path or address of the folder.
        chunk_format: What its index says.
    """

    def __init__(self, folder: str, chunk_format: ChunkFormat) -> None:
        self.folder = folder
        self.format = chunk_format
        self.chunks = chunk_format.chunks
        self._open: dict[int, RemoteFile | OpenFile] = {}
        self._edges: OrderedDict[int, Ints] = OrderedDict()
        self._unpacked: DecodedBlocks[int, list[Sized]] = DecodedBlocks()

    def records(self, number: int, own: Ints) -> Sequence[Sized]:
        """Return records of a chunk, given their ascending numbers in it.

        Raises:
            FormatError: If the chunk is damaged, or not the one in the index.
        """
        if self.format.is_packed:
            chunk = self._unpack(number)
            return [chunk[record] for record in own.tolist()]
        edges = self.offsets(number)
        low, high = edges[own], edges[own + 1]
        buffers, begin = read_spans(self.open(number), low, high)
        bounds = zip(buffers, (low - begin).tolist(), (high - begin).tolist(), strict=True)
        return [memoryview(data)[start:stop] for data, start, stop in bounds]

    def extents(self, number: int, own: Ints) -> tuple[Ints, Ints]:
        """Return which bytes of a chunk hold some of its records; of a packed chunk, all."""
        if self.format.is_packed:
            return np.zeros(len(own), np.int64), np.full(len(own), self._size(number), np.int64)
        edges = self.offsets(number)
        return edges[own], edges[own + 1]

    def offsets(self, number: int) -> Ints:
        """Return where the records of a chunk begin, and the end of the last one.

        Raises:
            FormatError: If the chunk is damaged, or not the one in the index.
        """
        if number not in self._edges:
            self._note_edges(number, self._read_head(number))
        return self._edges[number]

    def fetch_offsets(self, numbers: Sequence[int]) -> None:
        """Fetch the offsets of several chunks in a store at once, so that waits do not add up."""
        missing = [number for number in numbers if number not in self._edges][:KNOWN_CHUNKS]
        if self.format.is_packed or not is_remote(self.folder) or len(missing) < 2:
            return
        for number in missing:
            self.open(number)  # here, so that the folder is listed once and not by each thread
        store, _ = open_store(self.folder)
        heads = store.together(self._read_head, [(number,) for number in missing])
        for number, head in zip(missing, heads, strict=True):
            self._note_edges(number, head)

    def open(self, number: int) -> RemoteFile | OpenFile:
        """Return a chunk, open for reading ranges."""
        if number not in self._open:
            name = self.chunks[number].name
            info = self._listed.get(name) if is_remote(self.folder) else None
            self._open[number] = range_file(join_address(self.folder, name), info=info)
        return self._open[number]

    def origin(self, number: int) -> str:
        """Return the name of a chunk for messages."""
        return redact(join_address(self.folder, self.chunks[number].name))

    def _unpack(self, number: int) -> list[Sized]:
        """Return all records of a packed chunk."""
        chunk = self._unpacked.get(number)
        if chunk is None:
            data = self.open(number).pread(0, self._size(number))
            self._check_size(number)
            origin = self.origin(number)
            chunk = list(self.format.records(number, data, origin))
            check_num_records(len(chunk), self.chunks[number].num_records, origin)
            self._unpacked.keep(number, chunk, sum(map(len, chunk)))
        return chunk

    def _read_head(self, number: int) -> bytes:
        """Return the first bytes of a chunk, which have the offsets of its records."""
        size = COUNT_BYTES + 4 * (self.chunks[number].num_records + 1)
        if not is_remote(self.folder):  # a store is not asked for the size first
            size = min(size, self._size(number))  # an index may claim any number of records
        return self.open(number).pread(0, size)

    def _note_edges(self, number: int, head: bytes) -> None:
        count, origin = self.chunks[number].num_records, self.origin(number)
        self._check_size(number)
        check_num_records(count_of(head), count, origin)
        self._edges[number] = record_edges(head[COUNT_BYTES:], count, self._size(number), origin)
        if len(self._edges) > KNOWN_CHUNKS:
            self._edges.popitem(last=False)

    @cached_property
    def _listed(self) -> dict[str, ObjectInfo]:
        """The chunks in a store by name, where it can list them: one request instead of many."""
        _, folder = open_store(self.folder)
        try:
            listed = list_files(self.folder)
        except StorageError:
            return {}
        return {info.key: info._replace(key=f"{folder}/{info.key}".lstrip("/")) for info in listed}

    def _size(self, number: int) -> int:
        return self.open(number).size

    def _check_size(self, number: int) -> None:
        size, stated = self._size(number), self.chunks[number].size
        if self.format.sizes_are_exact and size != stated:
            raise FormatError(
                f"{self.origin(number)}: has {size} bytes, but {CHUNK_INDEX} says {stated}; it is "
                "incomplete or was replaced, copy the folder again"
            )


ASSUMED_RATIO = 4
"""Bytes of records to those of the packed chunk, where slices are planned."""


def split_folders(address: str) -> dict[str, str]:
    """Return the folder of each split, by its name; without splits, there is one called "".

    Raises:
        DatasetNotFoundError: If there is no index.
        ConfigError: If several folders are the same split.
    """
    if is_file(join_address(address, CHUNK_INDEX)):
        return {"": address}
    indexes = _indexes_below(address)
    if not indexes:
        raise DatasetNotFoundError(f"{redact(address)}: there is no {CHUNK_INDEX} in it")
    splits = guess_splits(indexes, by_file=False, origin=redact(address))
    for split, own in splits.items():
        if len(own) > 1:
            raise ConfigError(
                f"{redact(address)}: {own[0]} and {own[1]} are both of the split "
                f"{split or 'train'!r} by the names of their folders; name one folder, or blend "
                "them in a metadataset"
            )
    return {split: join_address(address, os.path.dirname(own[0])) for split, own in splits.items()}


def _indexes_below(address: str) -> list[str]:
    """Return the paths of the indexes in the folders directly in a folder."""
    if not is_remote(address):
        try:
            folders, _ = folder_entries(local_path(address))
        except OSError:
            return []
        names = [f"{folder.name}/{CHUNK_INDEX}" for folder in folders]
    else:
        try:
            listed = [info.key for info in list_files(address)]
        except StorageError:  # web servers list nothing
            names = [f"{word}/{CHUNK_INDEX}" for word in SPLIT_WORDS]
        else:
            ending = f"/{CHUNK_INDEX}"
            return [key for key in listed if key.count("/") == 1 and key.endswith(ending)]
    return [name for name in names if is_file(join_address(address, name))]


def read_index(folder: str) -> Any:
    """Return the content of a folder's index."""
    path = join_address(folder, CHUNK_INDEX)
    text = decode_utf8(read_document(path), origin=redact(path))
    return parse_json(text, origin=redact(path), hint="copy the folder again, or rewrite it")


class ChunkSource(ItemSource):
    """The records of a split, numbered from 0. Their keys are their numbers, in nine digits.

    Args:
        address: The folder, or one with a folder for each split.
        selection: Which samples to read, and which parts if `options` name none.
        options: The options in the document.

    Raises:
        DatasetNotFoundError: If there is no index.
        FormatError: If the index is invalid.
        ConfigError: If there is no such split, or records have an unknown encoding.
        SecurityError: If records are pickled, which is not allowed.
        EmptyDatasetError: If no sample is left.
    """

    format_type: ClassVar[type[MdsFormat] | type[LitDataFormat]]

    def __init__(
        self,
        address: str | os.PathLike[str],
        selection: SampleSelection = TRAIN_SPLIT,
        options: RowOptions | None = None,
    ) -> None:
        options = options or RowOptions(origin=redact(address))
        self._reopen = partial(type(self), os.fspath(address), selection, options)
        origin = options.origin or redact(address)
        folders = split_folders(os.fspath(address))
        split = chosen_split(selection.split_part, folders, origin=redact(address), by=BY_NAMES)
        self.folder = folders[split]
        index = redact(join_address(self.folder, CHUNK_INDEX))
        self.format: ChunkFormat = self.format_type(read_index(self.folder), index, options.allow)
        self.columns = self.format.columns
        self.files = self.format.chunks
        self.ends = np.array([0, *accumulate(file.num_records for file in self.files)], np.int64)
        self._chunks = ChunkFiles(self.folder, self.format)
        total = int(self.ends[-1])
        bounds = (0, total)
        if not split:
            part = selection.split_part
            bounds = ratio_range(options.split, part, total, what="samples", origin=origin)
        super().__init__(any_path(address), selection, bounds=bounds, columns=options.columns)

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
    def number_space(self) -> tuple[str, ...]:
        return ("records", self.folder)

    @property
    def all_parts(self) -> list[str]:
        return [name for name in self.columns if not name.startswith("__")]

    def key_of(self, number: int) -> str:
        return f"{number:09}"

    def numbers_of(self, key: str) -> Sequence[int]:
        at = self._file_numbers.get(key)
        return super().numbers_of(key) if at is None else range(*self.ends[at : at + 2].tolist())

    @cached_property
    def _file_numbers(self) -> dict[str, int]:
        return {file.name: at for at, file in enumerate(self.files)}

    def shard_of(self, number: int) -> str:
        return self.files[self._file_of(number)].name

    def position(self, number: int) -> tuple[str, int, int]:
        at = self._file_of(number)
        own = number - int(self.ends[at])
        offset = 0 if self.is_packed else int(self._chunks.offsets(at)[own])
        return self.files[at].name, own, offset

    def content(self) -> Any:
        return [list(file) for file in self.files]

    def items(self, numbers: Ints) -> list[Item | DecodeError]:
        items: list[Any] = [None] * len(numbers)
        for file, order in self._by_file(numbers):
            origin = self._chunks.origin(file)
            own = numbers[order] - self.ends[file]
            records = zip(own.tolist(), self._chunks.records(file, own), strict=True)
            for at, (number, record) in zip(order.tolist(), records, strict=True):
                try:
                    items[at] = self._item(file, record, f"{origin}, record {number}")
                except FormatError as error:
                    items[at] = DecodeError(str(error))
        return items

    def extents(self, ordinals: Ints) -> Iterator[Extents]:
        """Yield where the records of samples are; of packed chunks, the whole chunk."""
        numbers = self.numbers(ordinals)
        for file, order in self._by_file(numbers):
            low, high = self._chunks.extents(file, numbers[order] - self.ends[file])
            yield Extents(self._chunks.open(file), order, low, high)

    def _by_file(self, numbers: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield the chunks that records are in, and the indices of their records, in file order."""
        at = np.searchsorted(self.ends, numbers, side="right") - 1
        files = distinct(at).tolist()
        self._chunks.fetch_offsets(files)
        for file in files:
            rows = np.flatnonzero(at == file)
            yield file, rows[np.argsort(numbers[rows], kind="stable")]

    def _item(self, file: int, record: Sized, origin: str) -> Item:
        parts: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for name, value in self.format.row(file, record, origin, self._is_read).items():
            parts[name], file_names = _encoded(name, value)
            if file_names is not None:
                files[name] = file_names
        return parts, files

    def _is_read(self, name: str) -> bool:
        return self.takes(name) and not name.startswith("__")

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
    if image.mode in ("HSV", "RGBa", "La"):  # no format has these
        image = image.convert({"HSV": "RGB", "RGBa": "RGBA", "La": "LA"}[image.mode])
    buffer = io.BytesIO()
    # PNG has no other colors, and no more than 16 bits.
    extension = "png" if image.mode in _PNG_MODES else "tiff"
    image.save(buffer, extension.upper(), **({"compress_level": 1} if extension == "png" else {}))
    return buffer.getvalue(), extension


_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})


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

    def describe(self, address: str, *, parts: bool = True, **documents: str) -> dict[str, Any]:
        sources = {n: self.source(address, SampleSelection(n)) for n in self.split_names(address)}
        splits = {
            name: split_description(len(source), len(source.files))
            for name, source in sources.items()
        }
        samples = sum(len(source) for source in sources.values())
        files = [file for source in sources.values() for file in source.files]
        facts = description(samples, len(files), sum(file.size for file in files), splits)
        return {**facts, "columns": next(iter(sources.values())).columns}


class ChunkRows:
    """The records of a dataset for `energon pack`, with pixels that are not encoded yet.

    Args:
        format_type: The format of its index.
        address: The folder, or one with a folder for each split.

    Raises:
        DatasetNotFoundError: If there is no index.
        FormatError: If the index is invalid.
    """

    def __init__(self, format_type: type[MdsFormat] | type[LitDataFormat], address: str) -> None:
        self._folders = split_folders(os.fspath(address))
        self._formats: dict[str, ChunkFormat] = {
            split: format_type(read_index(folder), redact(join_address(folder, CHUNK_INDEX)))
            for split, folder in self._folders.items()
        }

    @property
    def split_names(self) -> list[str]:
        """The names of the folders of splits; one empty name without splits."""
        return list(self._folders)

    def read(self, split: str, start: int) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the records of a split from number `start` on, and the chunk that each is in.

        Raises:
            FormatError: If a chunk is damaged.
        """
        chunk_format, first = self._formats[split], 0
        for number, chunk in enumerate(chunk_format.chunks):
            skip = min(max(0, start - first), chunk.num_records)
            first += chunk.num_records
            if skip == chunk.num_records:
                continue
            address = join_address(self._folders[split], chunk.name)
            origin = redact(address)
            records = list(chunk_format.records(number, read_bytes(address), origin, skip))
            check_num_records(skip + len(records), chunk.num_records, origin)
            for record in records:
                yield chunk_format.row(number, record, origin), origin


mds_rows = partial(ChunkRows, MdsFormat)
litdata_rows = partial(ChunkRows, LitDataFormat)
MDS = ChunkKind("mds", "a dataset of MosaicML Streaming", MdsRecords)
LITDATA = ChunkKind("litdata", "a dataset of LitData", LitDataRecords)
