"""Points in a compressed file from which it can be decompressed without the preceding data.

A gzip file is one stream from end to end: decompressing a byte needs the 32 KiB before it, and
blocks start at any bit. So a point is the start of a block, in bits, together with those 32 KiB.
zlib decompresses from there if they are its dictionary, and if the bits in front of the block are
filled with empty blocks. A zstd file can only be entered at the start of a frame, and the command
`zstd` writes a single one: a file with long frames is read from a copy in short frames.

| bytes of `x.gz.points` | content |
|---|---|
| 8 | `ENSEEK01` |
| … | the 32 KiB before each point, packed by zlib; nothing at the start of a stream |
| 8 N | position of each point in the file or its copy, in bits, little-endian like all numbers |
| 8 N | position of each point in the content, in bytes |
| 8 (N + 1) | start in this file of the 32 KiB of each point, and the end of the last |
| 8 | bytes of the copy, if the file has one |
| 32 | 1 for gzip, 2 for zstd or 3 for zstd with a copy; bytes of the file, of its content, N |
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from energon.arrays import Ints
from energon.errors import ConfigError, FormatError, ShardChangedError, TruncatedError
from energon.formats.compressed import (
    FED_BYTES,
    GZIP_MAGIC,
    SKIPPED_MAGIC,
    ZSTD_MAGIC,
    aligned,
    block_candidates,
    end_of_block,
    gzip_header,
    inflate,
    inflater_after,
    unpacked_frames,
    zstd_decoder,
    zstd_error,
)
from energon.messages import shell_word

SPACING_BYTES = 4 << 20
"""Content between two points, if a block or frame starts there."""
POINT_GAP_BYTES = 64 << 20
"""Maximum content between two points, all of which may be unpacked for a line."""
DEFLATE_WINDOW_BYTES = 32 << 10
"""How far deflate refers back."""
UNPACKED_PIECE_BYTES = 64 << 10
_MAGIC = b"ENSEEK01"
_END = struct.Struct("<4Q")
_GZIP, _ZSTD, _COPY = 1, 2, 3


class LongFrameError(ConfigError):
    """A frame is too long to be unpacked for a line: the file needs a copy in short frames."""


@dataclass(frozen=True)
class SeekPoints:
    """The points of a file.

    Args:
        format: 1 for gzip, 2 for zstd, 3 for zstd with a copy.
        packed_size: Bytes of the file that is entered, which is the copy if there is one.
        unpacked_size: Bytes of its content.
        bits: The bit of the file at which each point is, shape (N,).
        starts: The byte of the content that comes there, shape (N,).
        data: What the table was read from.
        edges: Where in it the bytes before each point are, shape (N + 1,).
        origin: The compressed file, for messages.
    """

    format: int
    packed_size: int
    unpacked_size: int
    bits: Ints
    starts: Ints
    data: Any
    edges: Ints
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
        kind, packed_size, unpacked_size, count = _END.unpack(data[-_END.size :])
        end = _END.size + 8 * (kind == _COPY)
        table = 8 * (3 * count + 1) + end
        if kind not in (_GZIP, _ZSTD, _COPY) or not count or len(data) < len(_MAGIC) + table:
            raise TruncatedError(
                f"{origin}.points: has {len(data)} bytes, not a complete table; {again}"
            )
        if packed_size != size:
            raise ShardChangedError(
                f"{origin}: has {size} bytes, had {packed_size} when it was indexed; {again}"
            )
        if kind == _COPY:
            packed_size = int.from_bytes(data[-end : -_END.size], "little")
        numbers = np.frombuffer(data, "<i8", 3 * count + 1, len(data) - table)
        bits, starts, edges = np.split(numbers, [count, 2 * count])
        whole = edges[0] == len(_MAGIC) and edges[-1] == len(data) - table
        rises = [(np.diff(each) >= 0).all() for each in (bits, starts, edges)]
        inside = 0 <= bits[0] <= bits[-1] < 8 * packed_size and 0 == starts[0] <= starts[-1]
        if not (whole and inside and all(rises) and starts[-1] <= unpacked_size):
            raise FormatError(f"{origin}.points: its numbers are invalid; {again}")
        return cls(kind, packed_size, unpacked_size, bits, starts, data, edges, origin)

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def is_copy(self) -> bool:
        """Whether the points are those of a copy in short frames, and not of the file."""
        return self.format == _COPY

    def holding(self, offsets: Ints) -> Ints:
        """Return the index of the last point at or before each offset in the content."""
        return np.searchsorted(self.starts, offsets, side="right") - 1

    def packed_range(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of the file from some points to the next ones."""
        stops = np.append(-(-self.bits[1:] // 8), self.packed_size)
        return self.bits[numbers] // 8, stops[numbers]

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
        packed = bytes(self.data[self.edges[number] : self.edges[number + 1]])
        place = f"from byte {self.bits[number] // 8} on"
        try:
            window = zlib.decompressobj().decompress(packed, DEFLATE_WINDOW_BYTES)
            if self.format == _GZIP:
                bit = int(self.bits[number]) % 8
                found = inflate(data, bit, window, stop - start)
            else:
                found = b"".join(unpacked_frames(data, stop - start))
        except (zlib.error, EOFError, zstd_error()) as error:
            raise FormatError(
                f"{self.origin}: cannot be unpacked {place}: {error}; the file is damaged or "
                "changed, restore it or run `energon prepare` again"
            ) from error
        if len(found) != stop - start:
            raise FormatError(
                f"{self.origin}: holds {len(found)} bytes {place}, held {stop - start} when it was "
                "indexed; restore it or run `energon prepare` again"
            )
        return found


class PointFinder:
    """Unpacks a file once from beginning to end, and writes its table of points.

    At each point decompression starts over, so that the checksums of the file prove the points too.

    Args:
        out: Where to write the table; None writes none, and accepts frames of any length.
        origin: The compressed file, for messages.
        copy: Where to write the content of a zstd file in short frames; None writes no copy.
    """

    def __init__(self, out: BinaryIO | None, *, origin: str, copy: BinaryIO | None = None) -> None:
        self._out = out
        self._origin = origin
        self._copy = copy
        self._bits: list[int] = []
        self._starts: list[int] = []
        self._edges = [len(_MAGIC)]
        self._unpacked = 0
        self._tail = b""

    def blocks(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the content of a file, and write the table after the last of it.

        Raises:
            FormatError: If it is neither a gzip nor a zstd file, or damaged.
            LongFrameError: If it needs a copy.
            ConfigError: If it cannot be entered often enough.
        """
        head = file.read(UNPACKED_PIECE_BYTES)
        self._write(_MAGIC)
        if head.startswith(GZIP_MAGIC):
            kind, blocks = _GZIP, self._gzip(head, file)
        elif head.startswith(ZSTD_MAGIC) or head[1:4] == SKIPPED_MAGIC:
            kind, blocks = _ZSTD, self._zstd(head, file)
            if self._copy is not None:
                kind, blocks = _COPY, self._copied(blocks, self._copy)
        else:
            raise FormatError(
                f"{self._origin}: begins with {head[:4]!r}; expected a gzip or zstd file"
            )
        try:
            for block in blocks:
                self._unpacked += len(block)
                self._tail = (self._tail + block[-DEFLATE_WINDOW_BYTES:])[-DEFLATE_WINDOW_BYTES:]
                yield block
                is_far = self._unpacked - self._starts[-1] > POINT_GAP_BYTES
                if is_far and self._out is not None and kind != _COPY:
                    raise self._no_entry(kind)
        except (zlib.error, zstd_error()) as error:
            raise FormatError(
                f"{self._origin}: is damaged before byte {file.tell()}: {error}; restore it"
            ) from error
        except EOFError:
            raise TruncatedError(
                f"{self._origin}: ends within its content at byte {file.tell()}; the file is "
                "truncated, restore it"
            ) from None
        self._write(np.array([*self._bits, *self._starts, *self._edges], "<u8").tobytes())
        if self._copy is not None:
            self._write(self._copy.tell().to_bytes(8, "little"))
        self._write(_END.pack(kind, file.tell(), self._unpacked, len(self._bits)))

    def _no_entry(self, kind: int) -> ConfigError:
        """Return why a file cannot be read line by line as it is, and what to do."""
        size = f"more than {POINT_GAP_BYTES >> 20} MiB"
        if kind == _GZIP:
            return ConfigError(
                f"{self._origin}: no block can be found in {size} of its content; decompress it"
            )
        return LongFrameError(
            f"{self._origin}: a frame holds {size}, all of which one line would need; write it in "
            f"smaller frames: `zstd -dc {self._origin} | split -C 8M --filter='zstd -qc' > "
            "NEW.zst`, in its place"
        )

    def _write(self, data: bytes) -> None:
        if self._out is not None:
            self._out.write(data)

    @property
    def _is_due(self) -> bool:
        return not self._starts or self._unpacked - self._starts[-1] >= SPACING_BYTES

    def _note(self, bit: int, start: int, window: bytes) -> None:
        """Record a point; `window` is the content before it."""
        packed = zlib.compress(window) if window else b""
        self._bits.append(bit)
        self._starts.append(start)
        self._edges.append(self._edges[-1] + len(packed))
        self._write(packed)

    def _gzip(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
        while data or (data := file.read(UNPACKED_PIECE_BYTES)):
            while (header := gzip_header(data)) is None:
                data += _more(file)
            data = data[header:]
            if self._is_due:
                self._note(8 * (file.tell() - len(data)), self._unpacked, b"")
            decoder: Any = zlib.decompressobj(-15)
            checksum = size = 0
            while not decoder.eof:
                data = data or _more(file)
                if self._is_due:
                    block, decoder, data = self._enter(decoder, data, file.tell() - len(data))
                else:
                    block, data = decoder.decompress(data), b""
                checksum, size = zlib.crc32(block, checksum), size + len(block)
                yield block
            data = decoder.unused_data + data
            while len(data) < 8:
                data += _more(file)
            if struct.unpack("<2I", data[:8]) != (checksum, size % 2**32):
                raise zlib.error("its checksum differs")
            data = data[8:]
            while not data.strip(b"\0") and (more := file.read(UNPACKED_PIECE_BYTES)):
                data = more  # zeros that fill up a tape
            data = data.lstrip(b"\0")

    def _enter(self, decoder: Any, data: bytes, at: int) -> tuple[bytes, Any, bytes]:
        """Decompress up to the first block that begins in `data`, and record a point there.

        Args:
            decoder: What unpacks the file.
            data: The next bytes of it.
            at: Where in these to begin.

        Returns:
            What was unpacked, what unpacks the rest, and the rest.
        """
        blocks, fed = [], 0
        for byte, bit in block_candidates(data):
            blocks.append(decoder.decompress(data[fed:byte]))
            fed = byte
            if decoder.eof:
                break
            last = end_of_block(decoder, data[byte], bit)
            if last is None:
                continue
            block = b"".join([*blocks, last])
            window = (self._tail + block[-DEFLATE_WINDOW_BYTES:])[-DEFLATE_WINDOW_BYTES:]
            self._note(8 * (at + byte) + bit, self._unpacked + len(block), window)
            decoder = inflater_after(window)
            return (
                block + decoder.decompress(aligned(bit, data[byte])),
                decoder,
                data[byte + 1 :],
            )
        if not decoder.eof:
            blocks.append(decoder.decompress(data[fed:]))
            fed = len(data)
        return b"".join(blocks), decoder, data[fed:]

    def _zstd(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
        while data or (data := file.read(UNPACKED_PIECE_BYTES)):
            while len(data) < 8:
                data += _more(file)
            if data[1:4] == SKIPPED_MAGIC:
                length = 8 + int.from_bytes(data[4:8], "little")
                while len(data) < length:
                    length -= len(data)
                    data = _more(file)
                data = data[length:]
                continue
            if self._copy is None and self._is_due:
                self._note(8 * (file.tell() - len(data)), self._unpacked, b"")
            decoder = zstd_decoder()
            while not decoder.eof:
                piece, data = data[:FED_BYTES], data[FED_BYTES:]
                yield decoder.decompress(piece or _more(file))
            data = decoder.unused_data + data

    def _copied(self, blocks: Iterable[bytes], copy: BinaryIO) -> Iterator[bytes]:
        """Write the content of a file in short frames, and yield that of each."""
        import zstandard

        # Damage to the copy is found when a frame is unpacked.
        compressor = zstandard.ZstdCompressor(write_checksum=True)
        held: list[bytes] = []
        size = 0
        for piece in chain(_short_pieces(blocks), [b""]):
            held.append(piece)
            size += len(piece)
            if size >= SPACING_BYTES or (size and not piece):
                content = b"".join(held)
                held, size = [], 0
                self._note(8 * copy.tell(), self._unpacked, b"")
                copy.write(compressor.compress(content))
                yield content


def _short_pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield content in pieces, none of which is empty or longer than the space between points."""
    for block in blocks:
        for low in range(0, len(block), SPACING_BYTES):
            yield block[low : low + SPACING_BYTES]


def _more(file: BinaryIO) -> bytes:
    data = file.read(UNPACKED_PIECE_BYTES)
    if not data:
        raise EOFError("it is truncated")
    return data
