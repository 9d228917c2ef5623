"""Write samples to tar files: to one, or to as many as they need.

The same samples give the same bytes. Local files get their name when they are complete; after an
exception nothing of an incomplete one is left.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from energon.errors import ConfigError
from energon.formats.tar_header import END, encode_header
from energon.prepare.encode import Content
from energon.prepare.tar_writer import EncodedPart, EncodedSample, encode_sample
from energon.webdataset import security
from energon.webdataset.encoders import (
    bytes_only,
    default_handlers,
    encode_field,
    make_encoder,
    to_image,
)
from energon.webdataset.member_headers import HeaderFields
from energon.webdataset.sinks import Sink, make_folder, open_sink

__all__ = [
    "ShardWriter",
    "TarWriter",
    "default_handlers",
    "imageencoder",
    "numpy_dumps",
    "torch_dumps",
]

_RECORD = 10_240
_COPY_BYTES = 4 << 20
_SET_BY_READERS = frozenset({"__key__", "__url__", "__local_path__", "__bad__"})

logger = logging.getLogger("energon")


class TarWriter:
    """Writes samples to one tar file.

    Args:
        fileobj: A path, an address to write to, or an open binary stream.
        user: Owner of the members.
        group: Group of the members.
        mode: Permissions of the members.
        compress: True or "gz", "bz2", "xz", "zst"; None takes it from the end of the name.
        encoder: True encodes fields by their extensions. False takes bytes only. A dict has a
            function for each extension, and a function gets samples and returns them encoded.
        keep_meta: Whether fields that begin with `_` are written.
        mtime: Time of the members in seconds; None means 0, so that the same samples always give
            the same bytes.
        format: Accepted for compatibility: headers are ustar, extended where that does not do.
        index: Whether to write the index of a local, uncompressed file beside it.
        level: Level of the compression; None means that of the library.
        sort_fields: Whether fields are written in the order of their names; else as they come.
        allow: "shell" lets the address be a command.

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
        self.num_bytes = 0
        """What the archive has so far, before compression and without its end marker."""
        self._header = HeaderFields(user, group, mode, int(mtime or 0))
        self._encode = make_encoder(encoder)
        self._transform: Callable[[Any], Any] | None = encoder if self._encode is None else None
        self._keep_meta = keep_meta
        self._sort_fields = sort_fields
        self._sink: Sink | None = open_sink(
            fileobj, compress=compress, level=level, allowed=security.resolve(allow)
        )
        self._index = index

    def write(self, obj: Mapping[str, Any]) -> int:
        """Append a sample: its `__key__`, and a value for each field.

        Returns:
            How many bytes its fields have.

        Raises:
            ConfigError: If the sample cannot be written, or would be read back as another.
        """
        return self.write_encoded(self.encode(obj))

    def encode(self, obj: Mapping[str, Any]) -> EncodedSample:
        """Return a sample as it would be written."""
        if self._transform is not None:
            obj = self._transform(obj)
        if not isinstance(obj, Mapping):
            raise ConfigError(f"a sample is a dict, got {type(obj).__name__}")
        fields = _writable(obj, self._keep_meta, self._sort_fields)
        encode = self._encode or bytes_only
        reserved = {name: fields.pop(name) for name in list(fields) if _is_reserved(name)}
        encoded = encode_sample(fields, encode)
        kept = [_kept(encoded.key, name, encode(name, v)) for name, v in reserved.items()]
        return EncodedSample(encoded.key, kept + encoded.parts)

    def write_encoded(self, sample: EncodedSample) -> int:
        """Append a sample that is encoded already."""
        if self._sink is None:
            raise ConfigError("the tar file is closed")
        payload = 0
        try:
            for part in sample.parts:
                self._sink.write(self._header.applied_to(part.header))
                _copy(part.content, part.size, self._sink)
                self._sink.write(bytes(-part.size % 512))
                payload += part.size
        except BaseException:
            # Half a sample is in it.
            self.abort()
            raise
        self.num_samples += 1
        self.num_bytes += sample.num_bytes
        return payload

    def close(self) -> None:
        """Finish the archive."""
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        size = self.num_bytes + len(END)
        try:
            sink.write(END + bytes(-size % _RECORD))
            sink.close()
        except BaseException:
            sink.abort()
            raise
        if self._index and sink.path is not None and self.num_samples:
            from energon.prepare.index import index_shard

            index_shard(sink.path)

    def abort(self) -> None:
        """Leave nothing of a local file, or what was written to a stream as it is."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class ShardWriter:
    """Writes samples to numbered tar files.

    A file is begun with its first sample, and complete when it has its name. It is as large as
    it may be, headers included; only a sample that is larger alone is in a larger one. Folders
    are made.

    Args:
        pattern: Paths or addresses, with the number as in `%06d`.
        maxcount: Most samples of a file.
        maxsize: Most bytes of a file.
        post: Called with the path of each file that is complete.
        start_shard: Number of the first file.
        verbose: Whether to log each file.
        opener: Opens a file to write to, by its name; None opens paths and addresses.
        index: Whether to write the index of local, uncompressed files beside them: then their
            numbers of samples are known.
        kw: Arguments of `TarWriter`.

    Raises:
        ConfigError: If the pattern has no place for a number, or a limit is not positive.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        maxcount: int = 100_000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        *,
        index: bool = True,
        **kw: Any,
    ) -> None:
        self.pattern = os.fspath(pattern)
        self.maxcount = maxcount
        self.maxsize = maxsize
        self.shard = start_shard
        """Number of the next file."""
        self.total = 0
        """Samples in all files."""
        self.fname: str | None = None
        """The file that is being written."""
        self.shards: list[str] = []
        """Complete files."""
        self.tarstream: TarWriter | None = None
        self._post = post
        self._verbose = verbose
        self._opener = opener
        self._arguments = {**kw, "index": index}
        if maxcount < 1 or maxsize < 1:
            raise ConfigError(f"wanted are limits of 1 and more, got {maxcount=}, {maxsize=}")
        if self._name(0) == self._name(1):
            raise ConfigError(
                f"{self.pattern!r} gives all files the same name; wanted is one like "
                "shards/%06d.tar"
            )

    @property
    def count(self) -> int:
        """Samples of the present file."""
        return 0 if self.tarstream is None else self.tarstream.num_samples

    @property
    def size(self) -> int:
        """Bytes of the present file."""
        return 0 if self.tarstream is None else self.tarstream.num_bytes

    def next_stream(self) -> TarWriter:
        """Finish the present file and begin another one."""
        self.finish()
        name = self._name(self.shard)
        if self._verbose:
            logger.info("writing %s, %d samples so far", name, self.total)
        if self._opener is None:
            make_folder(name)
        target = name if self._opener is None else self._opener(name)
        self.tarstream = TarWriter(target, **self._arguments)
        self.fname = name
        self.shard += 1
        return self.tarstream

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write a sample, see `TarWriter.write`."""
        stream = self.tarstream or self.next_stream()
        encoded = stream.encode(obj)
        full = stream.num_bytes + encoded.num_bytes + _RECORD > self.maxsize
        if stream.num_samples >= self.maxcount or (full and stream.num_samples):
            stream = self.next_stream()
        size = stream.write_encoded(encoded)
        self.total += 1
        return size

    def finish(self) -> None:
        """Finish the present file."""
        if self.tarstream is None or self.fname is None:
            return
        stream, name = self.tarstream, self.fname
        self.tarstream = self.fname = None
        stream.close()
        self.shards.append(name)
        if self._post is not None:
            self._post(name)

    def close(self) -> None:
        """Finish the last file."""
        self.finish()

    def abort(self) -> None:
        """Leave the files that are complete, and nothing of the one that is not."""
        if self.tarstream is not None:
            self.tarstream.abort()
            self.tarstream = self.fname = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _name(self, number: int) -> str:
        try:
            return self.pattern % number
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.pattern!r} has no place for the number of a file ({error}); wanted is one "
                "like shards/%06d.tar"
            ) from error


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Return an image as the bytes of a file, see `encoders.to_image` for what it may be."""
    encoded = encode_field(f"image.{format.lower()}", to_image(image))
    return _content(encoded)


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an `.npy` file."""
    return _content(encode_field("array.npy", data))


def torch_dumps(data: Any) -> bytes:
    """Return anything as the bytes of a `.pth` file."""
    return _content(encode_field("data.pth", data))


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
    """Return a field that writers leave out by default, ready to be written."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return EncodedPart(name, encode_header(f"{key}.{name}", size), content, size)


def _copy(content: Content, size: int, sink: Sink) -> None:
    """Write the content of a field; that of a file without holding it in memory."""
    if isinstance(content, bytes):
        sink.write(content)
        return
    left = size
    with content.open("rb") as file:
        while left and (data := file.read(min(left, _COPY_BYTES))):
            sink.write(data)
            left -= len(data)
        if left or file.read(1):
            raise ConfigError(f"{content}: had {size} bytes, and changed while it was copied")


def _content(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
