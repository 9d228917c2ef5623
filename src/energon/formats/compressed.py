"""Decompress data within a limit, and enter gzip and zstd data in the middle.

A block (RFC 1951) may begin at any bit. It is recognized by its header, and by another block that
can take its place: the last one, with a content of ours.
"""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon.arrays import Ints
from energon.errors import DecodeError, FormatError, TruncatedError, needs_extra
from energon.limits import UNPACKED_BYTES, check_limit

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC, SKIPPED_MAGIC = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
SEARCHED_BYTES = 8 << 10
"""Compressed bytes searched for blocks at a time."""
_HEADER_BYTES = 12
"""What a block of Huffman codes says before the lengths of its codes, rounded up."""
_MARK = bytes.fromhex("5f1c9ae03b7742d8")


_MAGICS: dict[bytes, str] = {
    GZIP_MAGIC: "gz",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    ZSTD_MAGIC: "zstd",
}
"""The first bytes of compressed data, and the name of the compression."""
HEAD_BYTES = max(map(len, _MAGICS))


def compression_of(head: bytes) -> str | None:
    """Return the compression of data with these first `HEAD_BYTES`; None if uncompressed."""
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
        self._inner = zstd_decoder()
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
                piece, self._packed = self._packed[:FED_BYTES], self._packed[FED_BYTES:]
                self._unpacked = memoryview(self._inner.decompress(piece))
        except zstd_error() as error:
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


def gzip_header(data: bytes) -> int | None:
    """Return the length of the header that `data` begins with; None if it continues after that."""
    if len(data) < 10:
        return None
    if data[:3] != GZIP_MAGIC + b"\x08":
        raise zlib.error(f"expected a gzip header, found {data[:4]!r}")
    flags, at = data[3], 10
    if flags & 4:
        at += 2 + int.from_bytes(data[at : at + 2], "little")
    for flag in (8, 16):
        if flags & flag:
            at = data.find(b"\0", at) + 1
            if not at:
                return None
    at += flags & 2
    return at if at <= len(data) else None


def block_candidates(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the bytes and bits at which blocks may begin, ascending: few that do not."""
    for low in range(0, len(data) - _HEADER_BYTES, SEARCHED_BYTES):
        piece = np.frombuffer(data, np.uint8)[low : low + SEARCHED_BYTES + _HEADER_BYTES]
        found = np.concatenate((_dynamic_blocks(piece), _stored_blocks(piece)))
        for at in np.unique(found[found < 8 * SEARCHED_BYTES]).tolist():
            yield low + at // 8, at % 8


def _dynamic_blocks(piece: NDArray[np.uint8]) -> Ints:
    """Return the bits at which a block with dynamic Huffman codes has a valid header."""
    bits = np.unpackbits(piece, bitorder="little")
    triple = bits[:-2] | bits[1:-1] << 1 | bits[2:] << 2
    at = np.flatnonzero(triple[: -8 * _HEADER_BYTES] == 0b100)  # not the last block
    five = triple[:-2] | (triple[2:] & 6) << 2
    at = at[(five[at + 3] < 30) & (five[at + 8] < 30)]
    count = 4 + (five[at + 13] & 15).astype(np.int64)
    # The codes for lengths of codes have to fill their tree.
    share = np.array([0, 64, 32, 16, 8, 4, 2, 1], np.uint8)[triple]
    total = np.zeros(len(at), np.int64)
    for number in range(19):
        total += np.where(number < count, share[at + 17 + 3 * number], 0)
    return np.asarray(at[total == 128])


def _stored_blocks(piece: NDArray[np.uint8]) -> Ints:
    """Return the bits at which a block that is not compressed may begin."""
    words = piece[:-1].astype(np.uint16) | piece[1:].astype(np.uint16) << 8
    length = np.flatnonzero(words[1:-2] ^ words[3:] == 0xFFFF) + 1
    begins = (8 * length[:, None] - np.arange(3, 11)).ravel()
    return np.asarray(begins[begins >= 0])


def end_of_block(decoder: Any, byte: int, bit: int) -> bytes | None:
    """Return the content before the block at some bit of the next byte; None if there is none.

    If a block begins there, another one can take its place: the last, with a content of ours.
    """
    head = (byte & ((1 << bit) - 1)) | 1 << bit
    length = struct.pack("<2H", len(_MARK), len(_MARK) ^ 0xFFFF)
    probe = decoder.copy()
    try:
        found: bytes = probe.decompress(head.to_bytes((bit + 10) // 8, "little") + length + _MARK)
    except zlib.error:
        return None
    return found.removesuffix(_MARK) if probe.eof and found.endswith(_MARK) else None


def inflater_after(window: bytes) -> Any:
    """Return a decompressor for deflated bytes that follow `window`."""
    return zlib.decompressobj(-15, zdict=window) if window else zlib.decompressobj(-15)


def inflate(data: bytes, bit: int, window: bytes, size: int) -> bytes:
    """Return `size` bytes of the content of gzip members, from a block of the first one on."""
    decoder = inflater_after(window)
    blocks = [decoder.decompress(aligned(bit, data[0])) if data else b""]
    rest, missing = data[1:], size - len(blocks[0])
    while missing > 0:
        blocks.append(decoder.decompress(rest, missing))
        missing -= len(blocks[-1])
        if missing and decoder.eof:
            rest = decoder.unused_data[8:].lstrip(b"\0")
            header = gzip_header(rest)
            if header is None:
                break
            rest, decoder = rest[header:], zlib.decompressobj(-15)
        elif missing and not decoder.unconsumed_tail:
            break
        else:
            rest = decoder.unconsumed_tail
    return b"".join(blocks)


def aligned(bit: int, byte: int) -> bytes:
    """Return `byte`, in which a block begins at `bit`, after empty blocks that align it.

    These have 10 bits each; if the bit is odd, the first has 95.
    """
    value, count = (_EMPTY_BLOCK, 95) if bit % 2 else (0, 0)
    while count % 8 != bit:
        value |= 0b010 << count
        count += 10
    value |= byte >> bit << count
    return value.to_bytes((count + 8 - bit) // 8, "little")


def _empty_block() -> int:
    """Return the 95 bits of an empty block with dynamic Huffman codes."""
    fields = [(0b100, 3), (0, 5), (0, 5), (15, 4)]
    # Lengths of the codes for 18 (many zeros), 0 and 1, in the order in which these are listed.
    lengths = {18: 1, 0: 2, 1: 2}
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
    fields += [(lengths.get(symbol, 0), 3) for symbol in order]
    # 138 and 118 zeros, a code of one bit for the end, none for distances, and the end.
    fields += [(0, 1), (127, 7), (0, 1), (107, 7), (0b11, 2), (0b01, 2), (0, 1)]
    value = count = 0
    for number, width in fields:
        value |= number << count
        count += width
    return value


_EMPTY_BLOCK = _empty_block()


FED_BYTES = 1 << 10
"""Four bytes of zstd can stand for 128 KiB, and everything fed is unpacked: 32 MiB at most."""
_MAX_ZSTD_WINDOW_BYTES = 2 << 30
"""How far a frame may refer back: as far as `zstd --long=31` does."""


def unpacked_frames(data: bytes, size: int) -> Iterator[bytes]:
    """Yield up to `size` bytes of the content of zstd frames."""
    while size > 0 and data:
        if data[1:4] == SKIPPED_MAGIC:
            data = data[8 + int.from_bytes(data[4:8], "little") :]
            continue
        decoder = zstd_decoder()
        while not decoder.eof and data and size >= 0:
            piece, data = data[:FED_BYTES], data[FED_BYTES:]
            block = decoder.decompress(piece)
            size -= len(block)
            yield block
        data = decoder.unused_data + data


def zstd_decoder() -> Any:
    """Return a decompressor for one frame."""
    with needs_extra("formats", "files of zstd need zstandard"):
        import zstandard
    return zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).decompressobj()


def zstd_error() -> type[Exception]:
    """Return the exception class of zstandard; without the package, nothing can raise it."""
    try:
        import zstandard
    except ImportError:
        return EOFError
    error: type[Exception] = zstandard.ZstdError
    return error
