"""Decompress data within a limit: all at once, as a stream, or from points in the middle.

A gzip file consists of members and a zstd file of frames, each of which can only be decompressed
from its beginning. A file in which they are long, such as the single one that `gzip` and `zstd`
write, is read from a copy in short ones.

| bytes of `x.gz.points` | content |
|---|---|
| 8 | `ENSEEK02` |
| 8 N | position of each point in the file or its copy, in bytes, little-endian like all numbers |
| 8 N | position of each point in the content, in bytes |
| 40 | 1 for gzip, 2 for zstd; bytes of the file, of its copy (0 without one), of its content, N |
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from energon.arrays import Ints
from energon.errors import (
    ConfigError,
    DecodeError,
    FormatError,
    ShardChangedError,
    TruncatedError,
    needs_extra,
)
from energon.limits import UNPACKED_BYTES, check_limit
from energon.messages import shell_word

_MAGICS: dict[bytes, str] = {
    b"\x1f\x8b": "gz",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
"""The first bytes of compressed data, and the name of the compression."""
HEAD_BYTES = max(map(len, _MAGICS))
_SKIPPED_MAGIC = b"\x2a\x4d\x18"
"""What follows the first byte of a zstd frame that readers skip; some writers begin with one."""
_FED_BYTES = 1 << 10
"""Four bytes of zstd can stand for 128 KiB, and everything fed is unpacked: 32 MiB at most."""
_MAX_ZSTD_WINDOW_BYTES = 2 << 30
"""How far a zstd frame may refer back: as far as `zstd --long=31` does."""


def compression_of(head: bytes) -> str | None:
    """Return the compression of data with these first `HEAD_BYTES`; None if uncompressed."""
    if head[1:4] == _SKIPPED_MAGIC and head[0] >> 4 == 5:
        return "zstd"
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None)


def decompressed(data: bytes | memoryview, compression: str) -> bytes:
    """Decompress data, as far as `UNPACKED_BYTES` allows.

    Args:
        data: The data.
        compression: One of `DECOMPRESSORS`.

    Raises:
        DecodeError: If they are damaged, or have more content than that.
        MissingExtraError: If zstandard is not installed.
    """
    pieces, size = [], 0
    limit = UNPACKED_BYTES.value
    stream = Unpacked(io.BytesIO(data), compression, origin=f"its {compression} data")
    try:
        while piece := stream.read(_PIECE_BYTES) if data else b"":
            pieces.append(piece)
            size += len(piece)
            check_limit(size, UNPACKED_BYTES, f"it unpacks to more than {limit} bytes")
    except FormatError as error:
        cause = error.__cause__ or "the end is missing"
        raise DecodeError(f"its {compression} data are incomplete or damaged: {cause}") from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Unpacked(io.RawIOBase):
    """The content of a compressed stream. Concatenated streams are read through to the end.

    Memory is taken for the bytes that are read, however much the stream expands to.

    Args:
        stream: The compressed bytes after `head`.
        compression: One of `DECOMPRESSORS`.
        head: The first compressed bytes.
        origin: Name of the stream in messages.
        advice: What to do about damaged data, for messages.
    """

    def __init__(
        self,
        stream: Any,
        compression: str,
        *,
        head: bytes = b"",
        origin: str,
        advice: str = "restore the file or write it again",
    ) -> None:
        super().__init__()
        self._stream = stream
        self._packed = head
        self._make = DECOMPRESSORS[compression]
        self._origin = origin
        self._advice = advice
        self._unpack = self._make()
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, and none only at the end.

        Raises:
            TruncatedError: If the end is missing.
            FormatError: If the bytes are damaged.
        """
        if size < 0:
            return self.readall()
        while size and not self._is_over:
            if self._unpack.eof:
                self._next_stream()
                continue
            unpacked = self._unpack_some(size)
            if unpacked:
                return unpacked
            if not self._unpack.eof:
                self._packed = self._stream.read(_PACKED_BYTES) or b""
                if not self._packed:
                    raise TruncatedError(
                        f"{self._origin}: the compressed data end too early; {self._advice}"
                    )
        return b""

    def close(self) -> None:
        """Close the compressed stream."""
        if not self.closed:
            self._stream.close()
        super().close()

    def _next_stream(self) -> None:
        """Continue after the end of a compressed stream with the next one, or skip padding."""
        rest = self._unpack.unused_data
        # tar pads with zeros, and so do some tools that store compressed archives.
        while not (rest := rest.lstrip(b"\0")):
            rest = self._stream.read(_PACKED_BYTES) or b""
            if not rest:
                self._is_over = True
                return
        self._unpack, self._packed = self._make(), rest

    def _unpack_some(self, size: int) -> bytes:
        packed, self._packed = self._packed, b""
        try:
            unpacked: bytes = self._unpack.decompress(packed, size)
        except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError) as error:
            raise FormatError(
                f"{self._origin}: the compressed data are damaged ({error}); {self._advice}"
            ) from error
        return unpacked


class _Zlib:
    """zlib's decompressor with the interface of the other ones."""

    def __init__(self, window_bits: int) -> None:
        self._inner = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, size: int) -> bytes:
        unpacked: bytes = self._inner.decompress(self._inner.unconsumed_tail + data, size)
        return unpacked


class _Zstd:
    """zstandard's decompressor with the interface of the other ones."""

    def __init__(self) -> None:
        with needs_extra("formats", "files of zstd need zstandard"):
            import zstandard
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
        self._inner, self._error = decompressor.decompressobj(), zstandard.ZstdError
        self._packed = self._unpacked = memoryview(b"")

    @property
    def eof(self) -> bool:
        return self._inner.eof and not self._unpacked

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + bytes(self._packed)

    def decompress(self, data: bytes, size: int) -> bytes:
        if data:
            self._packed = memoryview(data)
        try:
            while not self._unpacked and self._packed and not self._inner.eof:
                piece, self._packed = self._packed[:_FED_BYTES], self._packed[_FED_BYTES:]
                self._unpacked = memoryview(self._inner.decompress(piece))
        except self._error as error:
            raise ValueError(str(error)) from error
        unpacked, self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return bytes(unpacked)


_PIECE_BYTES = 1 << 20
_PACKED_BYTES = 1 << 18
DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: _Zlib(31),
    "zlib": lambda: _Zlib(15),
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zstd": _Zstd,
    "zstandard": _Zstd,
}
"""Creates a decompressor for one stream: `decompress(data, size)`, `eof`, `unused_data`."""


SPACING_BYTES = 4 << 20
"""Content between two points, if a member or frame starts there, and of those in copies."""
LONG_BYTES = 16 << 20
"""Maximum content between two points, all of which may be unpacked for a line."""
_MAGIC = b"ENSEEK02"
_END = struct.Struct("<5Q")
_COMPRESSIONS = {"gz": 1, "zstd": 2}


class LongFrameError(ConfigError):
    """A file has to be copied into short frames, because one would be unpacked for each line."""


@dataclass(frozen=True)
class SeekPoints:
    """The points of a file.

    Args:
        compression: "gz" or "zstd".
        packed_size: Bytes of the file that is entered, which is the copy if there is one.
        unpacked_size: Bytes of its content.
        positions: The byte of the file at which each point is, shape (N,).
        starts: The byte of the content that comes there, shape (N,).
        is_copy: Whether the points are those of a copy in short frames, and not of the file.
        origin: The compressed file, for messages.
    """

    compression: str
    packed_size: int
    unpacked_size: int
    positions: Ints
    starts: Ints
    is_copy: bool
    origin: str

    @classmethod
    def parse(cls, data: Any, *, size: int, origin: str) -> SeekPoints:
        """Return the points in a table.

        Args:
            data: The table.
            size: Bytes of the compressed file now.
            origin: The compressed file, for messages.

        Raises:
            FormatError: If it is no such table, or damaged.
            ShardChangedError: If it belongs to another version of the file.
        """
        again = f"run `energon prepare {shell_word(origin)}` again"
        if len(data) < len(_MAGIC) + _END.size or bytes(data[:8]) != _MAGIC:
            raise FormatError(f"{origin}.points: is not a table of points; {again}")
        kind, file_size, copy_size, unpacked_size, count = _END.unpack(data[-_END.size :])
        if not count or len(data) != len(_MAGIC) + 16 * count + _END.size:
            raise TruncatedError(
                f"{origin}.points: has {len(data)} bytes, not a complete table; {again}"
            )
        if file_size != size:
            raise ShardChangedError(
                f"{origin}: has {size} bytes, had {file_size} when it was indexed; {again}"
            )
        numbers = np.frombuffer(data, "<i8", 2 * count, len(_MAGIC))
        positions, starts = numbers[:count], numbers[count:]
        packed_size = copy_size or file_size
        rises = all((np.diff(each) > 0).all() for each in (positions, starts))
        inside = positions[-1] < packed_size and starts[-1] < unpacked_size
        compression = next((name for name, own in _COMPRESSIONS.items() if own == kind), None)
        if compression is None or positions[0] or starts[0] or not (rises and inside):
            raise FormatError(f"{origin}.points: its numbers are invalid; {again}")
        is_copy = copy_size > 0
        return cls(compression, packed_size, unpacked_size, positions, starts, is_copy, origin)

    def __len__(self) -> int:
        return len(self.starts)

    def holding(self, offsets: Ints) -> Ints:
        """Return the index of the last point at or before each offset in the content."""
        return np.searchsorted(self.starts, offsets, side="right") - 1

    def packed_range(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of the file from some points to the next ones."""
        return self.positions[numbers], np.append(self.positions[1:], self.packed_size)[numbers]

    def content_range(self, number: int) -> tuple[int, int]:
        """Return the bytes of the content from a point to the next one."""
        ends = self.starts[number + 1 : number + 2].tolist() or [self.unpacked_size]
        return int(self.starts[number]), ends[0]

    def unpack(self, number: int, data: bytes) -> bytes:
        """Return the content from a point to the next one.

        Args:
            number: The point.
            data: The bytes of the file there, see `packed_range`.

        Raises:
            FormatError: If they are damaged.
        """
        start, stop = self.content_range(number)
        position = f"from byte {self.positions[number]} on"
        try:
            content = decompressed(data, self.compression)
        except DecodeError as error:
            raise FormatError(
                f"{self.origin}: cannot be unpacked {position}: {error}; the file is damaged or "
                "changed, restore it or run `energon prepare` again"
            ) from error
        if len(content) != stop - start:
            raise FormatError(
                f"{self.origin}: holds {len(content)} bytes {position}, held {stop - start} when "
                "it was indexed; restore it or run `energon prepare` again"
            )
        return content


def unpacked_blocks(
    file: BinaryIO, *, origin: str, table: BinaryIO | None = None, copy: BinaryIO | None = None
) -> Iterator[bytes]:
    """Yield the content of a gzip or zstd file, which proves its checksums.

    Args:
        file: The file, at its beginning.
        origin: Its name in messages.
        table: Where to write the table of its points, after the last of the content; None writes
            none, and accepts frames of any length.
        copy: Where to write the content in short frames; None writes no copy.

    Raises:
        FormatError: If it is neither a gzip nor a zstd file, or damaged.
        LongFrameError: If a table needs a copy.
    """
    head = file.read(HEAD_BYTES)
    compression = compression_of(head) or ""
    if compression not in _COMPRESSIONS:
        raise FormatError(f"{origin}: begins with {head[:4]!r}; expected a gzip or zstd file")
    stream = _Streams(file, compression, head=head, origin=origin, advice="restore the file")
    points = stream.points
    if copy is None:
        for block in iter(partial(stream.read, _PIECE_BYTES), b""):
            yield block
            if table is not None and stream.size - points[-1][1] > LONG_BYTES:
                raise LongFrameError(
                    f"{origin}: more than {LONG_BYTES >> 20} MiB of it can only be unpacked "
                    f"together. Write it in short frames: {_advice(compression, origin)}"
                )
    else:
        points, compress, start = [], _compressor(compression), 0
        content = io.BufferedReader(stream)
        while short := content.read(SPACING_BYTES):
            points.append((copy.tell(), start))
            copy.write(compress(short))
            start += len(short)
            yield short
    if table is not None:
        if len(points) > 1 and points[-1][1] == stream.size:
            points.pop()  # a frame without content is the last
        sizes = file.tell(), copy.tell() if copy else 0, stream.size, len(points)
        numbers = np.array(points, "<u8").T.tobytes()
        table.write(_MAGIC + numbers + _END.pack(_COMPRESSIONS[compression], *sizes))


class _Streams(Unpacked):
    """The content of a compressed file, which notes the members or frames that begin in it.

    Attributes:
        size: Bytes of the content so far.
        points: The position in the file and in the content of one in `SPACING_BYTES` of these.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.size = 0
        self.points = [(0, 0)]

    def read(self, size: int = -1, /) -> bytes:
        block = super().read(size)
        self.size += len(block)
        return block

    def close(self) -> None:
        """Leave the file open, which belongs to the caller."""
        io.RawIOBase.close(self)

    def _next_stream(self) -> None:
        super()._next_stream()
        if self._packed and self.size - self.points[-1][1] >= SPACING_BYTES:
            self.points.append((self._stream.tell() - len(self._packed), self.size))


def _advice(compression: str, origin: str) -> str:
    """Return the command that writes a file in short frames."""
    command, ending = {"gz": ("gzip", "gz"), "zstd": ("zstd", "zst")}[compression]
    return f"`{command} -dc {origin} | split -C 8M --filter='{command} -qc' > NEW.{ending}`"


def _compressor(compression: str) -> Callable[[bytes], bytes]:
    """Return the function that makes a member or frame with a checksum."""
    if compression == "gz":
        return partial(gzip.compress, compresslevel=4, mtime=0)
    import zstandard

    compress: Callable[[bytes], bytes] = zstandard.ZstdCompressor(write_checksum=True).compress
    return compress
