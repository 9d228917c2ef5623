"""Unpack streams, as told by their first bytes: gzip, bzip2, xz and zstd."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from energon.errors import FormatError, TruncatedError
from energon.extra import needs_extra

HEAD_BYTES = 6
"""So many bytes tell what a stream is."""
CHUNK_BYTES = 1 << 18
ZSTD_BYTES = 1 << 10


def unpacker_for(head: bytes) -> Callable[[], Any] | None:
    """Return what makes decompressors for a stream that begins with `head`; None if it is plain."""
    return next((make for magic, make in _FORMATS.items() if head.startswith(magic)), None)


class Unpacked:
    """What a compressed stream holds. Streams that were joined are read through to the end.

    Args:
        stream: The compressed bytes after `head`.
        head: The first of them.
        make: Makes a decompressor.
        origin: What messages call the stream.
    """

    def __init__(self, stream: Any, head: bytes, make: Callable[[], Any], *, origin: str) -> None:
        self._stream = stream
        self._packed = head
        self._make = make
        self._origin = origin
        self._unpack = make()
        self._is_over = False

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, none at the end only.

        Raises:
            TruncatedError: If the end is missing.
            FormatError: If the bytes are damaged.
        """
        while not self._is_over:
            if self._unpack.eof:
                self._next_stream()
                continue
            unpacked = self._unpack_some(size)
            if unpacked:
                return unpacked
            if not self._unpack.eof:
                self._packed = self._stream.read(CHUNK_BYTES) or b""
                if not self._packed:
                    raise TruncatedError(
                        f"{self._origin}: the compressed data end too early; restore the file or "
                        "write it again"
                    )
        return b""

    def close(self) -> None:
        """Close the compressed stream."""
        self._stream.close()

    def _next_stream(self) -> None:
        """Go on with what follows the end of a compressed stream: another one, or padding."""
        rest = self._unpack.unused_data or self._stream.read(CHUNK_BYTES) or b""
        # tar pads with zeros, and so may who stores compressed archives.
        rest = rest.lstrip(b"\0") or (self._stream.read(CHUNK_BYTES) or b"").lstrip(b"\0")
        if rest:
            self._unpack, self._packed = self._make(), rest
        else:
            self._is_over = True

    def _unpack_some(self, size: int) -> bytes:
        packed, self._packed = self._packed, b""
        try:
            unpacked: bytes = self._unpack.decompress(packed, size)
        except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError) as error:
            raise FormatError(
                f"{self._origin}: the compressed data are damaged ({error}); restore the file or "
                "write it again"
            ) from error
        return unpacked


class _Gzip:
    """zlib's decompressor with the interface of the other ones."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, size: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, size)


class _Zstd:
    """zstandard's decompressor with the interface of the other ones."""

    def __init__(self) -> None:
        with needs_extra("formats", "zstd needs zstandard"):
            import zstandard
        self._inner = zstandard.ZstdDecompressor().decompressobj()
        self._error = zstandard.ZstdError
        self._packed, self._at = b"", 0

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data + self._packed[self._at :]

    def decompress(self, data: bytes, size: int) -> bytes:
        if data:
            self._packed, self._at = data, 0
        try:
            while self._at < len(self._packed):
                # A byte may stand for 32 KiB, and all that is given is unpacked at once.
                piece = self._packed[self._at : self._at + ZSTD_BYTES]
                self._at += len(piece)
                unpacked: bytes = self._inner.decompress(piece)
                if unpacked or self._inner.eof:
                    return unpacked
        except self._error as error:
            raise ValueError(str(error)) from error
        return b""


_FORMATS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lzma.LZMADecompressor,
    b"\x28\xb5\x2f\xfd": _Zstd,
}
