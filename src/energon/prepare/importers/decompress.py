"""Read compressed files from the beginning to the end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from energon.errors import EnergonError, FormatError, needs_extra
from energon.io.epath import AnyPath
from energon.prepare.importers.selection import open_ascending

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MAGICS = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
}


def compression_of(file: BinaryIO) -> str:
    """Return one of `COMPRESSIONS` by the first bytes of a file, or "" for anything else."""
    head = file.read(max(map(len, _MAGICS)))
    file.seek(0)
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), "")


@contextmanager
def open_decompressed(
    path: AnyPath, compression: str | None = None, *, advice: str = "copy the file again"
) -> Iterator[BinaryIO]:
    """Open a file to read it from the beginning to the end, decompressed.

    Args:
        path: The file.
        compression: One of `COMPRESSIONS`, "" for none; None detects it from the first bytes.
        advice: What to do about damaged data, for messages.

    Raises:
        FormatError: If it is compressed and damaged.
    """
    with open_ascending(path) as file:
        kind = compression_of(file) if compression is None else compression
        if not kind:
            yield file
            return
        damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, OSError)
        if kind == ".zst":
            with needs_extra("formats", f"{path}: zst needs zstandard"):
                import zstandard
            damaged = (zstandard.ZstdError,)
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            unpacked: Any = io.BufferedReader(reader)
        else:
            unpacked = _OPENERS[kind](file)
        try:
            with unpacked:
                yield unpacked
        except EnergonError:
            raise
        except damaged as error:
            raise FormatError(f"{path}: {error}; {advice}") from error
