"""Decompress data within a limit, all at once or as a stream."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from energon.errors import DecodeError, FormatError, TruncatedError, needs_extra
from energon.limits import UNPACKED_BYTES, check_limit

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
