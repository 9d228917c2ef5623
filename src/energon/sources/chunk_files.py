"""The files of a dataset in chunks: which record is where, and reading records of one of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Sized
from functools import cached_property

import numpy as np

from energon.arrays import Ints
from energon.errors import FormatError, StorageError
from energon.formats.chunks.records import (
    CHUNK_INDEX,
    COUNT_BYTES,
    ChunkFormat,
    check_num_records,
    count_of,
    record_edges,
)
from energon.io.address import is_remote, join_address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import OpenFile
from energon.io.files import list_files, open_store
from energon.io.range_file import RangeFile, RemoteFile, range_file
from energon.sources.decoded_blocks import DecodedBlocks
from energon.sources.shards import read_spans

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
            self._note_edges(number, self.open(number).pread(0, self._head_bytes(number)))
        return self._edges[number]

    def fetch_offsets(self, numbers: Sequence[int]) -> None:
        """Fetch the offsets of several chunks in a store at once, so that waits do not add up."""
        missing = [number for number in numbers if number not in self._edges][:KNOWN_CHUNKS]
        if self.format.is_packed or not is_remote(self.folder) or len(missing) < 2:
            return
        asked = [(self.open(number), self._head_bytes(number)) for number in missing]
        store, _ = open_store(self.folder)
        for number, head in zip(missing, store.together(_read_head, asked), strict=True):
            self._note_edges(number, head)

    def open(self, number: int) -> RemoteFile | OpenFile:
        """Return a chunk, open for reading ranges."""
        found = self._open.get(number)
        if found is None:
            name = self.chunks[number].name
            info = self._listed.get(name) if is_remote(self.folder) else None
            found = self._open[number] = range_file(join_address(self.folder, name), info=info)
        return found

    def origin(self, number: int) -> str:
        """Return the name of a chunk for messages."""
        return redact(join_address(self.folder, self.chunks[number].name))

    def _unpack(self, number: int) -> list[Sized]:
        """Return all records of a packed chunk."""
        found = self._unpacked.get(number)
        if found is None:
            data = self.open(number).pread(0, self._size(number))
            self._check_size(number)
            origin = self.origin(number)
            found = list(self.format.records(number, data, origin))
            check_num_records(len(found), self.chunks[number].num_records, origin)
            self._unpacked.keep(number, found, sum(map(len, found)))
        return found

    def _head_bytes(self, number: int) -> int:
        head = COUNT_BYTES + 4 * (self.chunks[number].num_records + 1)
        # An index may claim any number of records; a store is not asked for the size first.
        return head if is_remote(self.folder) else min(head, self._size(number))

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
        return {each.key: each._replace(key=f"{folder}/{each.key}".lstrip("/")) for each in listed}

    def _size(self, number: int) -> int:
        return self.open(number).size

    def _check_size(self, number: int) -> None:
        size, stated = self._size(number), self.chunks[number].size
        if self.format.sizes_are_exact and size != stated:
            raise FormatError(
                f"{self.origin(number)}: has {size} bytes, but {CHUNK_INDEX} says {stated}; it is "
                "incomplete or was replaced, copy the folder again"
            )


def _read_head(file: RangeFile, size: int) -> bytes:
    return file.pread(0, size)
