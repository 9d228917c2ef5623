"""Write samples to tar files, and encode their values by the extensions of fields."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from energon.decode.values import Content, encode_part
from energon.errors import ConfigError, DatasetNotFoundError, needs_extra
from energon.formats.tar.headers import RECORD_BYTES
from energon.formats.tar.writer import MemberAttributes, encode_header
from energon.io.address import redact
from energon.messages import type_in_words
from energon.prepare.writers.shard_writer import (
    EncodedPart,
    EncodedSample,
    NumberedArchives,
    SampleArchive,
    Sink,
    encode_sample,
)
from energon.webdataset import security
from energon.webdataset.gopen import open_url, rewrite_url
from energon.webdataset.names import __getattr__ as __getattr__
from energon.webdataset.reading.urls import local_path

Encoder = Callable[[str, Any], Content]
"""`encode(field, value)` returns the content of a field."""

_IMAGES = frozenset(
    ["jpg", "jpeg", "png", "ppm", "pgm", "pbm", "tif", "tiff", "webp", "bmp", "gif", "img", "image"]
)
_OTHER_NAMES = {
    **dict.fromkeys(("img", "image"), "jpg"),
    "class": "cls",
    "tenbin": "ten",
    "msgpack": "mp",
}
_TEXTS = frozenset(["txt", "text", "transcript", "html", "htm"])
_EXTENSIONS = (
    *("cls", "cls2", "class", "count", "index", "inx", "id", "txt", "text", "transcript", "html"),
    *("htm", "pyd", "pickle", "pkl", "pth", "npy", "npz", "ten", "tenbin", "tb", "json", "jsn"),
    *("mp", "msgpack", "msg", "cbor", *sorted(_IMAGES)),
)
TOLERANCE = 1e-3
"""How far float pixel values may exceed the range 0 to 1."""


def encode_field(field: str, value: Any) -> Content:
    """Return the content of a field, by its last extension.

    Supports everything that `encode_part` of `energon.prepare` does, and images from float arrays
    in 0 to 1 and from tensors (C, H, W), and the extensions class, html, htm, tenbin, msgpack,
    img and image.

    Raises:
        ConfigError: If a value of this type cannot be written under this name.
    """
    if isinstance(value, bytes | bytearray | memoryview | str):
        return encode_part(field, value)
    extension = _extension(field)
    if extension in _IMAGES:
        value = to_image(value, field)
    if extension in _TEXTS:
        raise ConfigError(f"field {field!r} is {type_in_words(value)}, expected text (str)")
    if extension in _OTHER_NAMES:
        start = field.lower().rindex(extension)
        stop = start + len(extension)
        field = f"{field[:start]}{_OTHER_NAMES[extension]}{field[stop:]}"
    return encode_part(field, value)


def bytes_only(field: str, value: Any) -> Content:
    """Return a field that must be bytes, or the path of a file that contains them.

    Raises:
        ConfigError: If it is something else.
    """
    if not isinstance(value, bytes | bytearray | memoryview | PathLike):
        raise ConfigError(
            f"field {field!r} is {type_in_words(value)}; with encoder=False, fields are bytes"
        )
    return encode_part(field, value)


Handlers = Mapping[str, Callable[[Any], Any]]


def encode_by_table(handlers: Handlers, field: str, value: Any) -> Content:
    """Return the content of a field, by the function for its extension.

    Raises:
        ConfigError: If there is none, or a value of this type cannot be written.
    """
    if isinstance(value, bytes | bytearray | memoryview | str):
        return encode_part(field, value)
    extension = _extension(field)
    handler = handlers.get(extension)
    is_default = handlers is default_handlers
    if handler is _BUILT_IN.get(extension) and (handler is not None or is_default):
        return encode_field(field, value)
    if handler is None:
        raise ConfigError(
            f"field {field!r} is {type_in_words(value)}, and the encoder knows "
            f"{', '.join(sorted(handlers))} only"
        )
    content = encode_part("bin", handler(value))
    is_packed = field.lower().endswith(".gz")
    return gzip.compress(content_bytes(content), mtime=0) if is_packed else content


def field_encoder(spec: Any) -> Encoder | None:
    """Return the encoder for an `encoder` argument; None if it is a function of whole samples.

    Raises:
        ConfigError: If it is invalid.
    """
    if spec is True:
        return partial(encode_by_table, default_handlers)
    if spec is False or spec is None:
        return bytes_only
    if isinstance(spec, Mapping):
        return partial(encode_by_table, spec)
    if callable(spec):
        return None
    raise ConfigError(
        f"encoder={spec!r}: expected True, False, a dict of functions by extension, or a function "
        "of a sample"
    )


def make_encoder(spec: Any) -> Callable[[Any], Any]:
    """Return the function of whole samples for an `encoder` argument."""
    encode = field_encoder(spec)
    if encode is None:
        transform: Callable[[Any], Any] = spec
        return transform

    def encode_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value if name.startswith("_") else content_bytes(encode(name, value))
            for name, value in sample.items()
        }

    return encode_sample


def content_bytes(content: Content) -> bytes:
    """Return the content of a field, read from its file if it is in one."""
    return content if isinstance(content, bytes) else content.read_bytes()


def to_image(value: Any, field: str = "image") -> Any:
    """Return an image as a Pillow image, or as an array of uint8 (H, W) or (H, W, C).

    Args:
        value: A Pillow image, or an array or tensor of uint8 or of floats in 0 to 1; tensors may
            have their channels first.
        field: Its name in messages.

    Raises:
        ConfigError: If floats are outside 0 to 1.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
        if value.ndim == 3 and value.shape[0] in (1, 3, 4):
            value = value.transpose(1, 2, 0)
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        low, high = float(value.min(initial=0)), float(value.max(initial=0))
        if not -TOLERANCE < low <= high < 1 + TOLERANCE:
            raise ConfigError(
                f"field {field!r}: floats of an image are between 0 and 1, found {low} to {high}"
            )
        return np.rint(np.clip(value, 0, 1) * 255).astype(np.uint8)
    return value


def _extension(field: str) -> str:
    return field.lower().removesuffix(".gz").rpartition(".")[2]


def _encode_as(extension: str, value: Any) -> Content:
    return encode_field(f"value.{extension}", value)


_BUILT_IN: dict[str, Callable[[Any], Any]] = {
    extension: partial(_encode_as, extension) for extension in _EXTENSIONS
}
default_handlers = dict(_BUILT_IN)
"""Functions that encode a value, by extension, used by `encoder=True`. A program may change them,
or a copy that it passes to a writer as `encoder`."""


_SUFFIXES = {"gz": "gz", "tgz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zst"}


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
    return Sink.at(path, lambda stream: _packer(stream, kind, level))


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
    if kind != "zst":
        return None
    with needs_extra("formats", "zstd needs zstandard"):
        import zstandard
    compressor = zstandard.ZstdCompressor(level=3 if level is None else level)
    return compressor.stream_writer(stream, closefd=False)


_SET_BY_READERS = frozenset({"__key__", "__url__", "__local_path__", "__bad__"})


class TarWriter(SampleArchive):
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
        self.user, self.group, self.mode, self.mtime = user, group, mode, mtime
        self.compress = compress
        self.keep_meta = keep_meta
        self.encoder = make_encoder(encoder)
        attributes = MemberAttributes(user, group, mode, int(mtime or 0))
        self._encode = field_encoder(encoder)
        self._transform: Callable[[Any], Any] | None = encoder if self._encode is None else None
        self._sort_fields = sort_fields
        name = fileobj if isinstance(fileobj, str | os.PathLike) else None
        super().__init__(
            open_sink(fileobj, compress=compress, level=level, allowed=security.resolve(allow)),
            name=redact(name) if name else str(getattr(fileobj, "name", "an archive")),
            attributes=attributes,
            record_bytes=RECORD_BYTES,
        )
        self._index = index

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

    def write(self, obj: Mapping[str, Any]) -> int:
        """Append a sample: its `__key__`, and a value for each field.

        Returns:
            Total size of its fields in bytes.

        Raises:
            ConfigError: If the sample cannot be written, or would be read back as another.
            DuplicateSampleKeyError: If a sample with this key was written before.
        """
        encoded = self.encode(obj)
        self.write_encoded(encoded)
        return sum(part.size for part in encoded.parts)

    def encode(self, obj: Mapping[str, Any]) -> EncodedSample:
        """Return a sample as it would be written."""
        if self._transform is not None:
            obj = self._transform(obj)
        if not isinstance(obj, Mapping):
            raise ConfigError(f"a sample is a dict, got {type(obj).__name__}")
        fields = _writable(obj, self.keep_meta, self._sort_fields)
        encode = self._encode or bytes_only
        reserved = [name for name in fields if name.startswith("__") and name != "__key__"]
        kept = {name: fields.pop(name) for name in reserved}
        encoded = encode_sample(fields, encode)
        kept_parts = [_kept(encoded.key, name, encode(name, v)) for name, v in kept.items()]
        return EncodedSample(encoded.key, kept_parts + encoded.parts)

    def _complete(self, sink: Sink) -> None:
        if self._index and sink.path and not sink.is_compressed and self.num_samples:
            from energon.prepare.index import index_shard

            index_shard(sink.path)


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


def _kept(key: str, name: str, content: Content) -> EncodedPart:
    """Return a field that writers omit by default, ready to be written."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return EncodedPart(name, encode_header(f"{key}.{name}", size), content, size)


logger = logging.getLogger("energon")


class ShardWriter(NumberedArchives[TarWriter]):
    """Writes samples to numbered tar files.

    A file is opened with its first sample, and gets its name once it is complete. It may reach
    the maximum size, headers included; only a single larger sample exceeds it. Folders are
    created.

    Args:
        pattern: Paths or addresses, with the number as in `%06d`.
        maxcount: Maximum number of samples in a file.
        maxsize: Maximum size of a file in bytes.
        post: Called with the path of each complete file.
        start_shard: Number of the first file.
        verbose: Whether to log each file.
        opener: Opens a file for writing, by its name; None opens paths and addresses.
        index: Whether to write indexes next to local, uncompressed files, from which their number
            of samples is known.
        kw: Arguments of `TarWriter`.

    Raises:
        ConfigError: If the pattern contains no number, or a limit is not positive.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with ShardWriter(f"{folder}/%03d.tar", maxcount=2, verbose=False) as sink:
        ...     for number in range(3):
        ...         size = sink.write({"__key__": f"{number}", "cls": number})
        >>> sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
        ['000.tar', '001.tar']
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
        super().__init__(
            os.fspath(pattern),
            maxcount=maxcount,
            maxsize=maxsize,
            start_shard=start_shard,
            post=post,
            end_bytes=RECORD_BYTES,
        )
        self.total = 0
        """Samples in all files."""
        self.verbose = verbose
        self.opener = opener
        self.kw = kw
        self._index = index
        self.close_at_exit()

    @property
    def tarstream(self) -> TarWriter | None:
        """The current file; None if there is none."""
        return self._archive

    @property
    def count(self) -> int:
        """Number of samples in the current file."""
        return 0 if self._archive is None else self._archive.num_samples

    @property
    def size(self) -> int:
        """Size of the current file in bytes."""
        return 0 if self._archive is None else self._archive.num_bytes

    def next_stream(self) -> TarWriter:
        """Finish the current file and begin the next."""
        return self._begin()

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write a sample, see `TarWriter.write`."""
        encoded = (self._archive or self._begin()).encode(obj)
        self._write(encoded)
        self.total += 1
        return sum(part.size for part in encoded.parts)

    def _open(self, name: str) -> TarWriter:
        if self.verbose:
            logger.info("writing %s, %d samples so far", name, self.total)
        if self.opener is None:
            make_folder(name)
        target = name if self.opener is None else self.opener(name)
        return TarWriter(target, **self.kw, index=self._index)


def imageencoder(image: Any, format: str = "PNG") -> bytes:
    """Return an image as the bytes of a file; see `encoders.to_image` for supported types.

    Example:
        >>> import numpy as np
        >>> imageencoder(np.zeros((4, 4, 3), np.uint8), "png")[:4]
        b'\\x89PNG'
    """
    encoded = encode_field(f"image.{format.lower()}", to_image(image))
    return content_bytes(encoded)


def numpy_dumps(data: Any) -> bytes:
    """Return an array as the bytes of an `.npy` file.

    Example:
        >>> import numpy as np
        >>> numpy_dumps(np.arange(3))[:6]
        b'\\x93NUMPY'
    """
    return content_bytes(encode_field("array.npy", data))


def torch_dumps(data: Any) -> bytes:
    """Return anything as the bytes of a `.pth` file.

    Example:
        >>> import torch
        >>> len(torch_dumps(torch.arange(3))) > 100
        True
    """
    return content_bytes(encode_field("data.pth", data))


def numpy_npz_dumps(data: dict[str, Any]) -> bytes:
    """Return arrays by name as the bytes of an `.npz` file."""
    return content_bytes(encode_field("arrays.npz", data))


def tenbin_dumps(x: Any) -> bytes:
    """Return an array, or a list of them, in the tenbin format."""
    return content_bytes(encode_field("arrays.ten", x))


def mp_dumps(x: Any) -> bytes:
    """Return a value in MessagePack."""
    return content_bytes(encode_field("data.mp", x))


def cbor_dumps(x: Any) -> bytes:
    """Return a value in CBOR."""
    return content_bytes(encode_field("data.cbor", x))


def make_handlers() -> dict[str, Callable[[Any], Any]]:
    """Return functions that encode a value, by extension, to be modified and passed to a writer."""
    return dict(default_handlers)


def add_handlers(
    d: dict[str, Callable[[Any], Any]], keys: str | Iterable[str], value: Callable[[Any], Any]
) -> None:
    """Add a function for some extensions, given as a list or separated by spaces."""
    for key in keys.split() if isinstance(keys, str) else keys:
        d[key] = value


def bytestr(data: Any) -> bytes:
    """Return bytes unchanged, anything else as ASCII text."""
    return data if isinstance(data, bytes) else str(data).encode("ascii")


def encode_based_on_extension1(
    data: Any, tname: str, handlers: Mapping[str, Callable[[Any], Any]]
) -> Any:
    """Return one field encoded by its extension, see `encode_based_on_extension`."""
    if not tname.startswith("_"):
        return content_bytes(encode_by_table(handlers, tname, data))
    if not isinstance(data, str):
        raise ConfigError(
            f"field {tname!r} is {type_in_words(data)}: the values of metadata must be text"
        )
    return data


def encode_based_on_extension(
    sample: Mapping[str, Any], handlers: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """Return a sample with its fields encoded by their extensions.

    Args:
        sample: The sample; fields that begin with an underscore are unchanged.
        handlers: Functions that encode a value, by extension; None for those of writers.
    """
    encoded: dict[str, Any] = make_encoder(True if handlers is None else handlers)(sample)
    return encoded
