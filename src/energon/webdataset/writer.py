"""Write samples to tar files, and encode single values as writers do."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from energon.errors import ConfigError
from energon.formats.tar.headers import RECORD_BYTES
from energon.io.atomic import ClosesAtExit
from energon.messages import type_in_words
from energon.webdataset.utils import reexport
from energon.webdataset.writing.encoders import (
    content_bytes,
    default_handlers,
    encode_field,
    sample_encoder,
    table_encoder,
    to_image,
)
from energon.webdataset.writing.tar_writer import TarWriter, make_folder

__all__ = [
    "ShardWriter",
    "TarWriter",
    "add_handlers",
    "bytestr",
    "cbor_dumps",
    "default_handlers",
    "encode_based_on_extension",
    "encode_based_on_extension1",
    "imageencoder",
    "make_encoder",
    "make_handlers",
    "mp_dumps",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]


logger = logging.getLogger("energon")


class ShardWriter(ClosesAtExit):
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
        self.post = post
        self.verbose = verbose
        self.opener = opener
        self.kw = kw
        self._index = index
        if maxcount < 1 or maxsize < 1:
            raise ConfigError(f"expected limits of 1 or more, got {maxcount=}, {maxsize=}")
        if self._name(0) == self._name(1):
            raise ConfigError(
                f"{self.pattern!r} gives all files the same name; expected one like shards/%06d.tar"
            )
        self.close_at_exit()

    @property
    def unfinished(self) -> str | None:
        """The incomplete file and how many samples it has; None if there is none."""
        return None if self.tarstream is None else self.tarstream.unfinished

    @property
    def count(self) -> int:
        """Number of samples in the current file."""
        return 0 if self.tarstream is None else self.tarstream.num_samples

    @property
    def size(self) -> int:
        """Size of the current file in bytes."""
        return 0 if self.tarstream is None else self.tarstream.num_bytes

    def next_stream(self) -> TarWriter:
        """Finish the current file and begin the next."""
        self.finish()
        name = self._name(self.shard)
        if self.verbose:
            logger.info("writing %s, %d samples so far", name, self.total)
        if self.opener is None:
            make_folder(name)
        target = name if self.opener is None else self.opener(name)
        self.tarstream = TarWriter(target, **self.kw, index=self._index)
        self.tarstream.is_owned = True
        self.fname = name
        self.shard += 1
        return self.tarstream

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write a sample, see `TarWriter.write`."""
        stream = self.tarstream or self.next_stream()
        encoded = stream.encode(obj)
        full = stream.num_bytes + encoded.num_bytes + RECORD_BYTES > self.maxsize
        if stream.num_samples >= self.maxcount or (full and stream.num_samples):
            stream = self.next_stream()
        size = stream.write_encoded(encoded)
        self.total += 1
        return size

    def finish(self) -> None:
        """Finish the current file."""
        if self.tarstream is None or self.fname is None:
            return
        stream, name = self.tarstream, self.fname
        self.tarstream = self.fname = None
        stream.close()
        self.shards.append(name)
        if self.post is not None:
            self.post(name)

    def close(self) -> None:
        """Finish the last file."""
        self.finish()

    def abort(self) -> None:
        """Keep complete files, and delete the incomplete one."""
        if self.tarstream is not None:
            self.tarstream.abort()
            self.tarstream = self.fname = None

    def _name(self, number: int) -> str:
        try:
            return self.pattern % number
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.pattern!r} has no place for the number of a file ({error}); expected one "
                "like shards/%06d.tar"
            ) from error


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
        return content_bytes(table_encoder(handlers)(tname, data))
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


make_encoder = sample_encoder

__getattr__ = reexport(__name__, {"gopen": "gopen:"})
