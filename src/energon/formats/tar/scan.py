"""Scan shards for samples and the positions of their parts.

Only headers are checked: small members are parsed out of large blocks, content of large ones
is skipped.

Archives of small members are read as a whole, in large pieces, into the same memory again and
again. Where the next header is far beyond the last one, only some kilobytes of it are read.

`<shard>.tar.idx` says where each sample begins: N + 1 little-endian unsigned 64-bit numbers
without a header, the offset of the first tar header of each sample, and the end of the last
member.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import lt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import FormatError, TruncatedError
from energon.formats.tar.headers import BLOCK, split_name, split_name_fields
from energon.formats.tar.parser import Member, Run, TarParser
from energon.local_file import open_descriptor, read_file


@dataclass(frozen=True, eq=False)
class TarScan:
    """The content of a shard: samples, parts and their positions. N samples, P parts."""

    size: int
    """Bytes of the shard."""
    part_names: tuple[str, ...]
    """The different names of parts."""
    sample_offset: Ints
    """(N + 1,) where each sample begins, headers included, and where the last one ends."""
    first_part: Ints
    """(N + 1,) number of the first part of each sample, and P."""
    part_name: Ints
    """(P,) index into `part_names`."""
    part_offset: Ints
    """(P,) where the content begins."""
    part_size: Ints
    """(P,) bytes of content."""
    key_start: Ints
    """(N + 1,) where each key begins in `key_bytes`, and their length."""
    key_bytes: bytes
    """All keys in UTF-8."""
    part_crc32: NDArray[np.uint32] | None = None
    """(P,) CRC-32 of each content; None if contents were not read."""

    @property
    def num_samples(self) -> int:
        """How many samples the shard has."""
        return len(self.sample_offset) - 1

    @property
    def keys(self) -> list[str]:
        """The keys of all samples."""
        edges = self.key_start.tolist()
        return [
            self.key_bytes[start:stop].decode("utf-8", "surrogateescape")
            for start, stop in pairwise(edges)
        ]

    def common_header(self) -> tuple[int, int] | None:
        """Return the header that all samples begin with, if it is the same for all.

        Returns:
            Blocks before the content of the first part of each sample, and the block in which the
            last one ends; None if samples differ.
        """
        if not self.num_samples:
            return None
        gaps = self.part_offset[self.first_part[:-1]] - self.sample_offset[:-1]
        if (gaps != gaps[0]).any():
            return None
        return int(gaps[0]) // BLOCK, int(self.sample_offset[-1]) // BLOCK

    def common_schema(self) -> tuple[int, ...] | None:
        """Return the names of the parts that all samples have, in this order; None if they differ.

        They are indices into `part_names`.
        """
        count = len(self.part_name) // max(1, self.num_samples)
        if not count or len(self.part_name) != count * self.num_samples:
            return None
        names = self.part_name.reshape(-1, count)
        regular = self.first_part[:-1] == np.arange(0, len(self.part_name), count)
        if not regular.all() or not (names == names[0]).all():
            return None
        return tuple(names[0].tolist())

    def common_key_length(self) -> int | None:
        """Return the length of all keys in bytes; None if they differ."""
        lengths = np.diff(self.key_start)
        if not len(lengths) or (lengths != lengths[0]).any():
            return None
        return int(lengths[0])

    def key_order(self) -> tuple[Ints | None, bool]:
        """Return the numbers of samples in the order of their keys, and whether keys are unique.

        The order is None if the samples are in it already.
        """
        edges = self.key_start.tolist()
        keys = [self.key_bytes[start:stop] for start, stop in pairwise(edges)]
        if all(map(lt, keys, keys[1:])):
            return None, True
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ascending = [keys[index] for index in order]
        return np.array(order), all(map(lt, ascending, ascending[1:]))


class ScanBuilder:
    """Collects the members of a shard in order, and groups them into samples.

    Consecutive members with the same key are the parts of a sample.
    """

    def __init__(self) -> None:
        self._columns = {
            name: _Column()
            for name in ("sample_offset", "first_part", "key_length", "name", "offset", "size")
        }
        self._keys: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._last_key: bytes | None = None
        self._num_parts = 0
        self._stop = 0

    def add(self, key: bytes, part: bytes, header_offset: int, offset: int, size: int) -> None:
        """Add one part."""
        columns = self._columns
        if key != self._last_key:
            self._keys.append(key)
            columns["sample_offset"].one.append(header_offset)
            columns["first_part"].one.append(self._num_parts)
            columns["key_length"].one.append(len(key))
            self._last_key = key
        columns["name"].one.append(self._numbers.setdefault(part, len(self._numbers)))
        columns["offset"].one.append(offset)
        columns["size"].one.append(size)
        self._num_parts += 1
        self._stop = offset + size + -size % BLOCK

    def add_member(self, member: Member) -> None:
        """Add a member, unless it belongs to no sample."""
        self._stop = member.end
        parts = split_name(member.name)
        if parts is not None:
            key, part = (text.encode("utf-8", "surrogateescape") for text in parts)
            self.add(key, part, member.header_offset, member.offset, member.size)

    def add_run(self, run: Run, start: int) -> None:
        """Add the members of a run that begins at byte `start`, if there are any."""
        if not len(run.size):
            return
        split = split_name_fields(run.names)
        header_offset, offset, size = run.header_offset, run.offset, run.size
        if not split.valid.all():
            header_offset, offset, size = (c[split.valid] for c in (header_offset, offset, size))
            split = split.take(split.valid)
        columns = self._columns
        if len(size):
            begins = np.append(split.key(0) != self._last_key, ~split.same_key_as_before())
            keys, lengths = split.keys(begins)
            self._keys.append(keys)
            self._last_key = split.key(-1)
            columns["sample_offset"].many(header_offset[begins] + start)
            columns["first_part"].many(np.flatnonzero(begins) + self._num_parts)
            columns["key_length"].many(lengths)
            names, indices = split.parts()
            numbers = [self._numbers.setdefault(name, len(self._numbers)) for name in names]
            columns["name"].many(np.array(numbers)[indices])
            columns["offset"].many(offset + start)
            columns["size"].many(size)
            self._num_parts += len(size)
        self._stop = start + run.stop

    def finish(self, size: int, part_crc32: NDArray[np.uint32] | None = None) -> TarScan:
        """Return the collected members; `size` is the size of the shard."""
        columns = {name: column.whole() for name, column in self._columns.items()}
        return TarScan(
            size=size,
            part_names=tuple(name.decode("utf-8", "surrogateescape") for name in self._numbers),
            sample_offset=np.append(columns["sample_offset"], self._stop),
            first_part=np.append(columns["first_part"], self._num_parts),
            part_name=columns["name"],
            part_offset=columns["offset"],
            part_size=columns["size"],
            key_start=np.concatenate(([0], np.cumsum(columns["key_length"]))),
            key_bytes=b"".join(self._keys),
            part_crc32=part_crc32,
        )


class _Column:
    """Integers, added one by one or in runs."""

    def __init__(self) -> None:
        self.one = array("q")
        self._pieces: list[NDArray[Any]] = []

    def many(self, values: Ints) -> None:
        self._flush()
        self._pieces.append(values)

    def whole(self) -> Ints:
        self._flush()
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, np.int64)

    def _flush(self) -> None:
        if self.one:
            self._pieces.append(np.frombuffer(self.one, np.int64))
            self.one = array("q")


logger = logging.getLogger("energon")


def tar_index_path(shard: str | os.PathLike[str]) -> Path:
    """Return the path of the index of a shard, whose last suffix becomes `.tar.idx`."""
    return Path(shard).with_suffix(".tar.idx")


def encode_tar_index(sample_offset: NDArray[np.integer]) -> bytes:
    """Return the content of an index file."""
    return sample_offset.astype("<u8").tobytes()


def load_tar_index(path: str | os.PathLike[str]) -> NDArray[np.uint64]:
    """Read an index file.

    Raises:
        FileNotFoundError: If there is none.
        TruncatedError: If it does not hold whole numbers.
        FormatError: If the offsets do not ascend.
    """
    return parse_tar_index(read_file(path), origin=str(path))


def parse_tar_index(data: bytes, *, origin: str) -> NDArray[np.uint64]:
    """Return the offsets in the content of an index file, see `load_tar_index`."""
    if len(data) % 8 or not data:
        raise TruncatedError(
            f"{origin}: has {len(data)} bytes, expected a multiple of 8; run `energon prepare` "
            f"again"
        )
    offsets = np.frombuffer(data, "<u8").astype(np.uint64)
    if (offsets[1:] < offsets[:-1]).any():
        raise FormatError(f"{origin}: its offsets do not ascend; run `energon prepare` again")
    return offsets


MAX_WINDOW_BYTES = 4 << 20
FIRST_WINDOW_BYTES = 256 << 10
MIN_WINDOW_BYTES = 4 << 10
JUMP_BYTES = 32 << 10
"""Content from here on is skipped rather than read."""

ReadInto = Callable[[int, memoryview], int]
"""`read_into(offset, buffer)` fills the buffer, less at the end of the file; returns how much."""


class TarWindow:
    """The part of an archive that is in memory.

    Args:
        read_into: Reads the archive.
        size: Its bytes.
    """

    def __init__(self, read_into: ReadInto, size: int) -> None:
        self._read_into = read_into
        self.size = size
        self.start = self.stop = 0
        self.window_bytes = FIRST_WINDOW_BYTES
        """How much is read next; little where most of the data is skipped content."""
        self._buffer = memoryview(bytearray(0))

    def block(self, position: int) -> bytes:
        """Return the block at a position, shorter or empty if the archive ends there."""
        at = position - self.start
        if at < 0 or position + BLOCK > self.stop:
            self._fill(position)
            at = 0
        return bytes(self._buffer[at : min(at + BLOCK, self.stop - self.start)])

    def blocks(self, position: int) -> memoryview:
        """Return all whole blocks in memory from a position on.

        They are overwritten by the next call of another method.
        """
        at = max(0, position - self.start)
        size = max(0, self.stop - position) // BLOCK * BLOCK
        return self._buffer[at : at + size]

    def read(self, position: int, size: int) -> bytes:
        """Return bytes from a position on, fewer at the end of the archive."""
        if self.start <= position and position + size <= self.stop:
            at = position - self.start
            return bytes(self._buffer[at : at + size])
        data = bytearray(max(0, min(size, self.size - position)))
        count = self._read_into(position, memoryview(data))
        return bytes(data[:count])

    def _fill(self, position: int) -> None:
        if position - self.stop >= JUMP_BYTES:
            self.window_bytes = MIN_WINDOW_BYTES
        size = max(0, min(self.window_bytes, self.size - position))
        self.window_bytes = min(2 * self.window_bytes, MAX_WINDOW_BYTES)
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(size))
        self.start = position
        self.stop = position + (self._read_into(position, self._buffer[:size]) if size else 0)


ReadRange = Callable[[int, int], bytes]
"""`read(offset, size)` returns `size` bytes, or fewer at the end of the file."""


def scan_tar(path: str | os.PathLike[str], *, strict: bool = True) -> TarScan:
    """Return the samples of a shard on local disk, from one pass over its headers.

    Args:
        path: The shard.
        strict: Whether an archive without an end marker is an error.

    Raises:
        TruncatedError: If the archive is truncated.
        FormatError: If it is not a tar archive.
        FileNotFoundError: If it does not exist.
    """
    descriptor = open_descriptor(path)
    try:

        def read_into(offset: int, buffer: memoryview) -> int:
            return os.preadv(descriptor, [buffer], offset)

        size = os.fstat(descriptor).st_size
        return scan_archive(read_into, size, origin=os.fspath(path), strict=strict)
    finally:
        os.close(descriptor)


def scan_archive(read_into: ReadInto, size: int, *, origin: str, strict: bool = True) -> TarScan:
    """Return the samples of an archive that can be read at any offset, see `scan_tar`.

    Args:
        read_into: Fills a buffer with the bytes from an offset on, and returns how many.
        size: Bytes of the archive.
        origin: Its name in messages.
        strict: Whether an archive without an end marker is an error.
    """
    walk = TarScanner(read_into, size, origin=origin)
    builder = ScanBuilder()
    while True:
        start = walk.position
        run = walk.next_run()
        if run is not None:
            builder.add_run(run, start)
        member = walk.next()
        if member is None:
            walk.finish(strict=strict)
            return builder.finish(size)
        builder.add_member(member)


def iter_members(
    read: ReadRange, size: int, *, origin: str, strict: bool = True
) -> Iterator[Member]:
    """Yield the regular files of an archive.

    Args:
        read: Returns bytes of the archive.
        size: Bytes of the archive.
        origin: Its name in messages.
        strict: Whether an archive without an end marker is an error; it may have lost members.

    Raises:
        TruncatedError: If a member or a header is truncated, or the end marker is missing.
        FormatError: If there is something else where a header should be.
    """

    def read_into(offset: int, buffer: memoryview) -> int:
        data = read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    walk = TarScanner(read_into, size, origin=origin)
    while (member := walk.next()) is not None:
        yield member
    walk.finish(strict=strict)


class TarScanner:
    """Goes through the headers of an archive that can be read at any offset.

    Args:
        read_into: Fills a buffer with the bytes from an offset on, and returns how many.
        size: Bytes of the archive.
        origin: Its name in messages.
    """

    def __init__(self, read_into: ReadInto, size: int, *, origin: str) -> None:
        self.window = TarWindow(read_into, size)
        self.size = size
        self._parser = TarParser(origin)

    def next(self) -> Member | None:
        """Return the next regular file, or None at the end of the archive.

        Raises:
            TruncatedError: If a member or a header is truncated.
            FormatError: If there is something else where a header should be.
        """
        parser, window = self._parser, self.window
        while True:
            needed, position = parser.needed_bytes, parser.position
            data = window.block(position) if needed == BLOCK else window.read(position, needed)
            if len(data) < needed:
                parser.finish(self.size, data)
                return None
            member = parser.take(data)
            if member is not None:
                self._check_content(member)
                return member

    @property
    def position(self) -> int:
        """Where the next header begins."""
        return self._parser.position

    def next_run(self) -> Run | None:
        """Return the plain members in memory, if there are many; see `TarParser.take_run`."""
        if not self._parser.wants_run:
            return None
        data = self.window.blocks(self.position)
        run = self._parser.take_run(data, self.size - self.position)
        if run is not None and 2 * run.size[run.size >= JUMP_BYTES].sum() >= len(data):
            self.window.window_bytes = MIN_WINDOW_BYTES
        return run

    def finish(self, *, strict: bool) -> None:
        """Check the end of the archive, after `next` returned None, and log its warnings.

        Raises:
            TruncatedError: If it is strict and the end marker is missing.
        """
        if strict:
            self._parser.check_end(self.size)
        for warning in self._parser.warnings:
            logger.warning("%s", warning)

    def _check_content(self, member: Member) -> None:
        parser = self._parser
        missing = member.offset + member.size - self.size
        if missing > 0:
            raise TruncatedError(
                f"{parser.origin}: {member.name!r} at byte {member.header_offset} has "
                f"{member.size} bytes, but the archive ends {missing} bytes too early; restore or "
                "write it again"
            )
        # What fills its last block may be missing where no end marker is asked for.
        parser.position = min(parser.position, self.size)
