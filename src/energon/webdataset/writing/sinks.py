"""Where tar files go: local files that are whole or not there, addresses, open streams."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from energon.errors import ConfigError, DatasetNotFoundError
from energon.extra import needs_extra
from energon.io.atomic import atomic_path
from energon.webdataset.gopen import open_url
from energon.webdataset.reading.rewriting import rewrite_url
from energon.webdataset.reading.urls import local_path

_SUFFIXES = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}


class Sink:
    """Takes the bytes of one archive.

    Args:
        stream: Where they go in the end.
        packer: Compresses them on their way; None does not.
        temporary: Gives a file its name when it is complete; None for anything else.
        path: Path of an uncompressed local file.
        owns_stream: Whether to close the stream.
    """

    def __init__(
        self,
        stream: Any,
        packer: Any = None,
        *,
        temporary: AbstractContextManager[Path] | None = None,
        path: str | None = None,
        owns_stream: bool = True,
    ) -> None:
        self.path = path
        self.write = (stream if packer is None else packer).write
        self._stream = stream
        self._packer = packer
        self._temporary = temporary
        self._owns_stream = owns_stream

    def close(self) -> None:
        """Finish: now the archive is there."""
        if self._packer is not None:
            self._packer.close()
        if self._owns_stream:
            self._stream.close()
        elif hasattr(self._stream, "flush"):
            self._stream.flush()
        if self._temporary is not None:
            self._temporary.__exit__(None, None, None)

    def abort(self) -> None:
        """Leave nothing, where that can be."""
        if hasattr(self._stream, "abort"):
            self._stream.abort()
        elif self._owns_stream:
            # Closing fails where the disk is full, with what was left in the buffer.
            with suppress(OSError):
                self._stream.close()
        if self._temporary is not None:
            with suppress(_Abandoned):
                self._temporary.__exit__(_Abandoned, _Abandoned(), None)


def make_folder(target: str) -> None:
    """Make the folder that a local file will be in."""
    path = local_path(rewrite_url(target))
    if path is not None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def open_sink(
    target: Any,
    *,
    compress: bool | str | None,
    level: int | None,
    allowed: Collection[str],
) -> Sink:
    """Return where an archive goes.

    Args:
        target: A path, an address, or an open binary stream.
        compress: See `TarWriter`.
        level: Level of the compression.
        allowed: What is allowed, see `security.resolve`.
    """
    if not isinstance(target, str | os.PathLike):
        if not hasattr(target, "write"):
            raise ConfigError(f"{target!r}: expected a path, an address, or a stream to write to")
        kind = _compression(compress, str(getattr(target, "name", "")))
        return Sink(target, _packer(target, kind, level), owns_stream=False)
    url = rewrite_url(os.fspath(target))
    # What a command makes of the bytes is its own affair.
    kind = _compression(compress, "" if url.startswith("pipe:") else url)
    path = local_path(url)
    if path is None:
        stream = open_url(url, "wb", allowed=allowed)
        return Sink(stream, _packer(stream, kind, level))
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise DatasetNotFoundError(f"{path}: there is no such folder to write to")
    if os.path.exists(path) and not os.path.isfile(path):
        # A device or a named pipe has to be written to as it is.
        device = open(path, "wb")  # noqa: SIM115 - the sink closes it
        return Sink(device, _packer(device, kind, level))
    temporary = atomic_path(path)
    stream = temporary.__enter__().open("wb", buffering=1 << 20)
    packer = _packer(stream, kind, level)
    return Sink(stream, packer, temporary=temporary, path=None if packer else path)


def _compression(compress: bool | str | None, name: str) -> str | None:
    """Return the kind of compression, by name or as it is asked for."""
    if compress is None:
        return _SUFFIXES.get(name.rpartition(".")[2])
    kind = "gz" if compress is True else compress or None
    if kind not in (None, *_SUFFIXES.values()):
        raise ConfigError(f"compress={compress!r}: expected gz, bz2, xz, zst, True or False")
    return kind


def _packer(stream: Any, kind: str | None, level: int | None) -> Any:
    """Return what compresses to `stream`, or None."""
    if kind == "gz":
        # Neither name nor time, so that the same content gives the same bytes.
        return gzip.GzipFile("", "wb", 9 if level is None else level, stream, mtime=0)
    if kind == "bz2":
        return bz2.BZ2File(stream, "wb", compresslevel=9 if level is None else level)
    if kind == "xz":
        return lzma.LZMAFile(stream, "wb", preset=level)
    return _zstd(stream, level) if kind == "zst" else None


def _zstd(stream: Any, level: int | None) -> Any:
    with needs_extra("formats", "zstd needs zstandard"):
        import zstandard
    compressor = zstandard.ZstdCompressor(level=3 if level is None else level)
    return compressor.stream_writer(stream, closefd=False)


class _Abandoned(Exception):
    """Tells `atomic_path` that the file is not wanted."""
