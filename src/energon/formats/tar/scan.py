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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from energon.errors import FormatError, TruncatedError
from energon.formats.tar.headers import BLOCK
from energon.formats.tar.parser import Member, Run, TarParser
from energon.formats.tar.scan_builder import ScanBuilder, TarScan
from energon.local_file import open_descriptor, read_file

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
        self._window_bytes = FIRST_WINDOW_BYTES
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
        found = self._read_into(position, memoryview(data))
        return bytes(data[:found])

    def expect_jumps(self) -> None:
        """Read little at a time from now on, because most of the data is skipped content."""
        self._window_bytes = MIN_WINDOW_BYTES

    def _fill(self, position: int) -> None:
        if position - self.stop >= JUMP_BYTES:
            self._window_bytes = MIN_WINDOW_BYTES
        size = max(0, min(self._window_bytes, self.size - position))
        self._window_bytes = min(2 * self._window_bytes, MAX_WINDOW_BYTES)
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
            self.window.expect_jumps()
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
