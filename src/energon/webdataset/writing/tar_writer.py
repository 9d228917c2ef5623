"""Write samples to one tar file: a local file, an address, or an open stream.

The same samples always produce the same bytes. Local files get their name once they are complete;
after an exception, nothing of an incomplete one remains.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    DuplicateSampleKeyError,
    needs_extra,
)
from energon.formats.tar.headers import RECORD_BYTES
from energon.formats.tar.writer import ArchiveWriter, MemberAttributes, encode_header
from energon.io.address import redact
from energon.io.atomic import ClosesAtExit, atomic_path, name_if_full
from energon.prepare.writers.encode import Content
from energon.prepare.writers.shard_writer import (
    EncodedPart,
    EncodedSample,
    encode_sample,
    unfinished_shard,
)
from energon.webdataset import security
from energon.webdataset.gopen import open_url, rewrite_url
from energon.webdataset.reading.urls import local_path
from energon.webdataset.writing.encoders import bytes_only, make_encoder, sample_encoder

_SUFFIXES = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}


class Sink:
    """Receives the bytes of one archive.

    Args:
        stream: The stream that they are written to.
        packer: Compresses them; None does not.
        temporary: Renames a complete file; None for anything else.
        path: Path of a local file; None for anything else.
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
        self.is_compressed = packer is not None
        self.write = (stream if packer is None else packer).write
        self._stream = stream
        self._packer = packer
        self._temporary = temporary
        self._owns_stream = owns_stream

    def close(self) -> None:
        """Finish the archive, which appears now."""
        if self._packer is not None:
            self._packer.close()
        if self._owns_stream:
            self._stream.close()
        elif hasattr(self._stream, "flush"):
            self._stream.flush()
        if self._temporary is not None:
            self._temporary.__exit__(None, None, None)

    def abort_after(self, error: BaseException) -> None:
        """Discard the archive because of an error, which names the file if the disk is full."""
        if self.path is not None:
            name_if_full(error, self.path)
        self.abort()

    def abort(self) -> None:
        """Discard the archive, where that is possible."""
        if hasattr(self._stream, "abort"):
            self._stream.abort()
        elif self._owns_stream:
            # Closing fails if the disk is full, because of what was left in the buffer.
            with suppress(OSError):
                self._stream.close()
        if self._temporary is not None:
            with suppress(_Abandoned):
                self._temporary.__exit__(_Abandoned, _Abandoned(), None)


def make_folder(target: str) -> None:
    """Create the folder of a local file."""
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
    """Open the destination of an archive.

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
    # A command may do anything with the bytes.
    kind = _compression(compress, "" if url.startswith("pipe:") else url)
    path = local_path(url)
    if path is None:
        stream = open_url(url, "wb", allowed=allowed)
        return Sink(stream, _packer(stream, kind, level))
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise DatasetNotFoundError(f"{path}: there is no such folder to write to")
    if os.path.exists(path) and not os.path.isfile(path):
        # A device or a named pipe must be written to directly.
        device = open(path, "wb")  # noqa: SIM115 - the sink closes it
        return Sink(device, _packer(device, kind, level))
    temporary = atomic_path(path)
    stream = temporary.__enter__().open("wb", buffering=1 << 20)
    return Sink(stream, _packer(stream, kind, level), temporary=temporary, path=path)


def _compression(compress: bool | str | None, name: str) -> str | None:
    """Return the kind of compression, as requested or by the name of the file."""
    if compress is None:
        return _SUFFIXES.get(name.rpartition(".")[2])
    kind = "gz" if compress is True else compress or None
    if kind not in (None, *_SUFFIXES.values()):
        raise ConfigError(f"compress={compress!r}: expected gz, bz2, xz, zst, True or False")
    return kind


def _packer(stream: Any, kind: str | None, level: int | None) -> Any:
    """Return a stream that compresses to `stream`; None for no compression."""
    if kind == "gz":
        # Without name and time, so that the same content produces the same bytes.
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
    """Tells `atomic_path` to discard the file."""


_SET_BY_READERS = frozenset({"__key__", "__url__", "__local_path__", "__bad__"})


class TarWriter(ClosesAtExit):
    """Writes samples to one tar file.

    Args:
        fileobj: A path, an address to write to, or an open binary stream.
        user: Owner of the members.
        group: Group of the members.
        mode: Permissions of the members.
        compress: True or "gz", "bz2", "xz", "zst"; None derives it from the end of the name.
        encoder: True encodes fields by their extensions; False accepts bytes only. A dict has a
            function for each extension; a function receives whole samples and returns them encoded.
        keep_meta: Whether to write fields that begin with `_`.
        mtime: Modification time of the members in seconds; None for 0, so that the same samples
            always produce the same bytes.
        format: Accepted for compatibility: headers are ustar, extended where necessary.
        index: Whether to write the index of a local, uncompressed file next to it.
        level: Compression level; None for the default of the library.
        sort_fields: Whether to write fields in the order of their names; otherwise in that of the
            sample.
        allow: "shell" permits an address that is a command.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with TarWriter(f"{folder}/dest.tar") as sink:
        ...     sink.write({"__key__": "sample000", "txt": "text", "cls": 7})
        5
    """

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: Any = None,
        *,
        index: bool = False,
        level: int | None = None,
        sort_fields: bool = True,
        allow: Collection[str] = (),
    ) -> None:
        self.num_samples = 0
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.compress = compress
        self.keep_meta = keep_meta
        self.encoder = sample_encoder(encoder)
        attributes = MemberAttributes(user, group, mode, int(mtime or 0))
        self._encode = make_encoder(encoder)
        self._transform: Callable[[Any], Any] | None = encoder if self._encode is None else None
        self._sort_fields = sort_fields
        self._sink: Sink | None = open_sink(
            fileobj, compress=compress, level=level, allowed=security.resolve(allow)
        )
        self._archive = ArchiveWriter(self._sink, attributes=attributes)
        self._index = index
        self._name = str(getattr(fileobj, "name", "an archive"))
        if isinstance(fileobj, str | os.PathLike):
            self._name = redact(fileobj)
        self._keys: set[str] = set()
        self.close_at_exit(self._sink)

    @property
    def unfinished(self) -> str | None:
        """The archive and how many samples it has; None if it is closed."""
        return None if self._sink is None else unfinished_shard(self._name, self.num_samples)

    @staticmethod
    def tarmode(fileobj: Any, compress: bool | str | None = None) -> str:
        """Return the mode in which Python's tar library would open an archive with this name."""
        name = fileobj if isinstance(fileobj, str) else ""
        kinds = {"gz": "gz", "bz2": "bz2", "xz": "xz", True: "gz"}
        if compress is None or isinstance(compress, str):
            ends = (kind for kind in ("gz", "bz2", "xz") if name.endswith(kind))
            return f"w|{kinds.get(compress or '', '') or next(ends, '')}"
        return f"w|{kinds.get(compress, '')}"

    @property
    def stream(self) -> Any:
        """The destination of the bytes; None once the archive is closed."""
        return self._sink

    @property
    def tarstream(self) -> TarWriter:
        """The archive, to which `addfile` appends single files."""
        return self

    def addfile(self, tarinfo: Any, fileobj: Any = None) -> None:
        """Append a file like `tarfile.TarFile.addfile`, with the owner and time of the writer.

        Args:
            tarinfo: The `name` and `size` of the file.
            fileobj: Its content; None if it is empty.
        """
        content = b"" if fileobj is None else fileobj.read(tarinfo.size)
        self._archive.add(encode_header(tarinfo.name, len(content)), content, len(content))

    @property
    def num_bytes(self) -> int:
        """Size of the archive so far, before compression and without its end marker."""
        return self._archive.num_bytes

    def write(self, obj: Mapping[str, Any]) -> int:
        """Append a sample: its `__key__`, and a value for each field.

        Returns:
            Total size of its fields in bytes.

        Raises:
            ConfigError: If the sample cannot be written, or would be read back as another.
            DuplicateSampleKeyError: If a sample with this key was written before.
        """
        return self.write_encoded(self.encode(obj))

    def encode(self, obj: Mapping[str, Any]) -> EncodedSample:
        """Return a sample as it would be written."""
        if self._transform is not None:
            obj = self._transform(obj)
        if not isinstance(obj, Mapping):
            raise ConfigError(f"a sample is a dict, got {type(obj).__name__}")
        fields = _writable(obj, self.keep_meta, self._sort_fields)
        encode = self._encode or bytes_only
        reserved = {name: fields.pop(name) for name in list(fields) if _is_reserved(name)}
        encoded = encode_sample(fields, encode)
        kept = [_kept(encoded.key, name, encode(name, v)) for name, v in reserved.items()]
        return EncodedSample(encoded.key, kept + encoded.parts)

    def write_encoded(self, sample: EncodedSample) -> int:
        """Append an encoded sample."""
        if self._sink is None:
            raise ConfigError("the tar file is closed")
        if sample.key in self._keys:
            raise DuplicateSampleKeyError(
                f"{self._name}: already has a sample with the key {sample.key!r}; keys must be "
                "unique in a shard"
            )
        self._keys.add(sample.key)
        payload = 0
        try:
            for part in sample.parts:
                self._archive.add(part.header, part.content, part.size)
                payload += part.size
        except BaseException as error:
            # It contains half a sample.
            sink, self._sink = self._sink, None
            sink.abort_after(error)
            raise
        self.num_samples += 1
        return payload

    def close(self) -> None:
        """Finish the archive."""
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        try:
            self._archive.end(record_bytes=RECORD_BYTES)
            sink.close()
        except BaseException as error:
            sink.abort_after(error)
            raise
        if self._index and sink.path and not sink.is_compressed and self.num_samples:
            from energon.prepare.index.index import index_shard

            index_shard(sink.path)

    def abort(self) -> None:
        """Delete a local file; what was written to a stream remains."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.abort()


def _writable(sample: Mapping[str, Any], keep_meta: bool, is_sorted: bool) -> dict[str, Any]:
    """Return the fields to write, `__key__` first."""
    if "__key__" not in sample:
        raise ConfigError(f'a sample needs a "__key__"; this one has {", ".join(map(str, sample))}')
    fields = {"__key__": sample["__key__"]}
    names = [name for name in sample if name not in _SET_BY_READERS]
    for name in sorted(names) if is_sorted else names:
        if not name.startswith("_") or keep_meta:
            fields[name] = sample[name]
    return fields


def _is_reserved(name: str) -> bool:
    return name.startswith("__") and name != "__key__"


def _kept(key: str, name: str, content: Content) -> EncodedPart:
    """Return a field that writers omit by default, ready to be written."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return EncodedPart(name, encode_header(f"{key}.{name}", size), content, size)
