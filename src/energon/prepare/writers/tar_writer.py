"""Write one shard, and the index of it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from energon.errors import ConfigError, DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable
from energon.formats.tables.part_table_file import part_table_path
from energon.formats.tar.headers import BLOCK
from energon.formats.tar.index import encode_tar_index, tar_index_path
from energon.formats.tar.names import split_name
from energon.formats.tar.scan_builder import ScanBuilder
from energon.formats.tar.writer import ArchiveWriter, encode_header
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import ClosesOrAborts, atomic_path, write_atomic
from energon.prepare.writers.encode import Content, encode_part

Encode = Callable[[str, Any], Content]
"""`encode(part, value)` returns the content of a part."""


class EncodedPart(NamedTuple):
    """A part that is ready to be written."""

    name: str
    header: bytes
    content: Content
    size: int


class EncodedSample(NamedTuple):
    """A sample that is ready to be written."""

    key: str
    parts: list[EncodedPart]

    @property
    def num_bytes(self) -> int:
        """What it takes in a shard."""
        return sum(len(part.header) + part.size + -part.size % BLOCK for part in self.parts)


def encode_sample(sample: Mapping[str, Any], encode: Encode = encode_part) -> EncodedSample:
    """Return a sample as it is written; names that begin with `__` are not parts.

    Raises:
        ConfigError: If it has no key, no parts, or names that a reader would take for others.
    """
    key = sample.get("__key__")
    if not isinstance(key, str):
        raise ConfigError(f'a sample needs a "__key__" that is a str, found {key!r}')
    parts = [
        _encode_part(key, part, encode(part, value))
        for part, value in sample.items()
        if not part.startswith("__")
    ]
    if len(parts) > 1 and len({part.name.lower() for part in parts}) < len(parts):
        raise ConfigError(
            f"sample {key!r} has parts whose names differ only in case, of "
            f"{', '.join(part.name for part in parts)}; parts are compared without it, so rename "
            "one of them"
        )
    if not parts:
        raise ConfigError(f"sample {key!r} has no parts, so nothing of it would be in the shard")
    return EncodedSample(key, parts)


def _encode_part(key: str, part: str, content: Content) -> EncodedPart:
    name = f"{key}.{part}"
    if split_name(name) != (key, part) or not part or "/" in part or "\0" in name:
        raise ConfigError(
            f"sample {key!r} with part {part!r} would be read back as another: the key is the path "
            "up to the first dot of the base name and not hidden, the part all that follows; "
            "replace dots in keys, slashes in parts"
        )
    if name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{name!r} leads out of the shard; keys are relative and without '..'")
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return EncodedPart(part, encode_header(name, size), content, size)


class TarWriter(ClosesOrAborts):
    """Writes one shard. The same samples give the same bytes, anywhere and at any time.

    The shard has its name only when it is complete; after an exception nothing is left. Its
    `.tar.idx` and `.tar.parts` are written with it, so `energon prepare` does not read it again.

    Args:
        path: The shard, a name that ends in `.tar`.
        encode: Turns values into contents, see `energon.prepare.writers.encode.encode_part`.
        checksum: Whether to keep a checksum of each part, for `energon verify`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with TarWriter(f"{folder}/000.tar") as writer:
        ...     written = writer.write({"__key__": "a", "txt": "text", "json": {"n": 1}})
    """

    def __init__(
        self, path: str | os.PathLike[str], *, encode: Encode = encode_part, checksum: bool = True
    ) -> None:
        if is_remote(path):
            raise ConfigError(
                f"{redact(path)}: shards are written on this machine; upload them when they are "
                "complete, as in ShardWriter(..., post=lambda path: EPath(path).move(target))"
            )
        self.path = Path(local_path(path))
        if self.path.suffix != ".tar":
            raise ConfigError(f"{path}: a shard has a name that ends in .tar")
        self.num_samples = 0
        self._encode = encode
        self._builder = ScanBuilder()
        self._keys: set[str] = set()
        self._crc32 = array("I") if checksum else None
        self._temporary = atomic_path(self.path)
        self._file: BinaryIO | None = self._temporary.__enter__().open("wb", buffering=1 << 20)
        self._archive = ArchiveWriter(self._file, checksum=checksum)

    @property
    def num_bytes(self) -> int:
        """What the shard has so far, without its end marker."""
        return self._archive.num_bytes

    def write(self, sample: Mapping[str, Any]) -> int:
        """Append a sample: its `__key__` and a value for each part, see `encode_sample`.

        Returns:
            How many bytes the shard grew by.

        Raises:
            ConfigError: If the sample cannot be written.
            DuplicateSampleKeyError: If the shard has one with this key.
        """
        return self.write_encoded(encode_sample(sample, self._encode))

    def write_encoded(self, sample: EncodedSample) -> int:
        """Append a sample that is encoded already, see `write`."""
        if self._file is None:
            raise ConfigError(f"{self.path}: the shard is closed")
        if sample.key in self._keys:
            raise DuplicateSampleKeyError(
                f"{self.path}: a sample with the key {sample.key!r} is in it already; keys must be "
                "unique in a dataset"
            )
        self._keys.add(sample.key)
        before = self.num_bytes
        key = sample.key.encode("utf-8", "surrogateescape")
        try:
            for part in sample.parts:
                self._write_part(key, part)
        except BaseException:
            self.abort()  # half a sample is in it
            raise
        self.num_samples += 1
        return self.num_bytes - before

    def close(self) -> None:
        """Finish the shard and write its index. A shard without samples is not written."""
        if self._file is None:
            return
        if not self.num_samples:
            self.abort()
            return
        try:
            self._archive.end()
            self._file.close()
        except BaseException:
            self.abort()
            raise
        self._file = None
        self._temporary.__exit__(None, None, None)
        about = self.path.stat()
        crc32 = None if self._crc32 is None else np.array(self._crc32, np.uint32)
        scan = self._builder.finish(about.st_size, crc32)
        table = PartTable.from_scan(scan, shard_mtime_ns=about.st_mtime_ns)
        write_atomic(tar_index_path(self.path), encode_tar_index(scan.sample_offset))
        write_atomic(part_table_path(self.path), table.to_bytes())

    def abort(self) -> None:
        """Leave nothing of the shard."""
        if self._file is not None:
            file, self._file = self._file, None
            # Closing fails where the disk is full, with what was left in the buffer.
            with suppress(OSError):
                file.close()
            with suppress(_ShardAbandoned):
                self._temporary.__exit__(_ShardAbandoned, _ShardAbandoned(), None)

    def _write_part(self, key: bytes, part: EncodedPart) -> None:
        start = self._archive.num_bytes
        crc32 = self._archive.add(part.header, part.content, part.size)
        if self._crc32 is not None:
            self._crc32.append(crc32)
        name = part.name.encode("utf-8", "surrogateescape")
        self._builder.add(key, name, start, start + len(part.header), part.size)


class _ShardAbandoned(Exception):
    """Tells `atomic_path` that the file is not wanted."""
