"""Write samples to one shard, or to as many as necessary, each with its index."""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from energon.decode.values import Content, encode_part
from energon.errors import ConfigError, DuplicateSampleKeyError
from energon.formats.tables.part_table import PartTable
from energon.formats.tar.headers import BLOCK, split_name
from energon.formats.tar.scan import ScanBuilder
from energon.formats.tar.writer import ArchiveWriter, MemberAttributes, encode_header
from energon.io.address import is_remote, local_path, redact
from energon.io.atomic import ClosesAtExit, atomic_path, name_if_full, write_atomic
from energon.messages import counted
from energon.prepare.files import remove_leftovers
from energon.prepare.index import index_contents, index_paths, index_shard

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
        """Its size in a shard."""
        return sum(len(part.header) + part.size + -part.size % BLOCK for part in self.parts)


def encode_sample(sample: Mapping[str, Any], encode: Encode = encode_part) -> EncodedSample:
    """Return a sample in the form in which it is written; names beginning with `__` are not parts.

    Raises:
        ConfigError: If it has no key, no parts, a value that cannot be written, or names that would
            be read back as others.
    """
    key = sample.get("__key__")
    if not isinstance(key, str):
        raise ConfigError(f'a sample needs a "__key__" that is a str, found {key!r}')
    contents: dict[str, Content] = {}
    for part, value in sample.items():
        if not part.startswith("__"):
            try:
                contents[part] = encode(part, value)
            except ConfigError as error:
                raise ConfigError(f"sample {key!r}: {error}") from error
    parts = [_encode_part(key, part, content) for part, content in contents.items()]
    if len(parts) > 1 and len({part.name.lower() for part in parts}) < len(parts):
        raise ConfigError(
            f"sample {key!r} has parts whose names differ only in case, among "
            f"{', '.join(part.name for part in parts)}; parts are compared ignoring case, so "
            "rename one of them"
        )
    if not parts:
        raise ConfigError(f"sample {key!r} has no parts, so the shard would not contain it")
    return EncodedSample(key, parts)


def _encode_part(key: str, part: str, content: Content) -> EncodedPart:
    name = f"{key}.{part}"
    if split_name(name) != (key, part) or not part or "/" in part or "\0" in name:
        raise ConfigError(
            f"sample {key!r} with part {part!r} would be read back as another: the key is the path "
            "up to the first dot of the base name and not hidden, the part is the rest; replace "
            "dots in keys and slashes in parts"
        )
    if name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"{name!r} leads out of the shard; keys are relative and without '..'")
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    return EncodedPart(part, encode_header(name, size), content, size)


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

    @classmethod
    def at(cls, path: str | os.PathLike[str], pack: Callable[[Any], Any] | None = None) -> Sink:
        """Return the sink of a file that gets its name when it is closed.

        Args:
            path: The file.
            pack: Returns a stream that compresses to another one; None does not compress.
        """
        temporary = atomic_path(path)
        stream = temporary.__enter__().open("wb", buffering=1 << 20)
        packer = None if pack is None else pack(stream)
        return cls(stream, packer, temporary=temporary, path=os.fspath(path))

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
            with suppress(_ShardAbandoned):
                self._temporary.__exit__(_ShardAbandoned, _ShardAbandoned(), None)


class _ShardAbandoned(Exception):
    """Tells `atomic_path` to discard the file."""


class SampleArchive(ClosesAtExit):
    """One archive of samples, which appears once it is complete.

    Args:
        sink: Receives its bytes.
        name: Its name in messages.
        attributes: Owner, mode and date of the members; None for the defaults.
        checksum: Whether the checksums of contents are computed.
        record_bytes: The size of the archive is a multiple of this.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        name: str,
        attributes: MemberAttributes | None = None,
        checksum: bool = False,
        record_bytes: int = BLOCK,
    ) -> None:
        self.num_samples = 0
        self._sink: Sink | None = sink
        self._name = name
        self._record_bytes = record_bytes
        self._keys: set[str] = set()
        self._archive = ArchiveWriter(sink, attributes=attributes, checksum=checksum)
        self.close_at_exit(sink)

    @property
    def unfinished(self) -> str | None:
        """The archive and how many samples it has; None if it is closed."""
        if self._sink is None:
            return None
        return f"{self._name} with {counted(self.num_samples, 'sample')}"

    @property
    def num_bytes(self) -> int:
        """Size of the archive so far, before compression and without its end marker."""
        return self._archive.num_bytes

    def write_encoded(self, sample: EncodedSample) -> None:
        """Append an encoded sample.

        Raises:
            ConfigError: If the archive is closed.
            DuplicateSampleKeyError: If it has a sample with this key.
        """
        if self._sink is None:
            raise ConfigError(f"{self._name}: is closed")
        if sample.key in self._keys:
            raise DuplicateSampleKeyError(
                f"{self._name}: already has a sample with the key {sample.key!r}; keys must be "
                "unique in a dataset"
            )
        self._keys.add(sample.key)
        try:
            for part in sample.parts:
                self._add(sample.key, part)
        except BaseException as error:
            self._discard(error)  # it contains half a sample
            raise
        self.num_samples += 1

    def close(self) -> None:
        """Finish the archive."""
        if self._sink is None:
            return
        try:
            self._archive.end(record_bytes=self._record_bytes)
            self._sink.close()
        except BaseException as error:
            self._discard(error)
            raise
        sink, self._sink = self._sink, None
        self._complete(sink)

    def abort(self) -> None:
        """Delete a local file; what was written to a stream remains."""
        self._discard(None)

    def _discard(self, error: BaseException | None) -> None:
        if self._sink is not None:
            sink, self._sink = self._sink, None
            if error is None:
                sink.abort()
            else:
                sink.abort_after(error)

    def _add(self, key: str, part: EncodedPart) -> None:
        """Append a part of a sample."""
        self._archive.add(part.header, part.content, part.size)

    def _complete(self, sink: Sink) -> None:
        """Write what belongs to an archive that is complete."""


class TarWriter(SampleArchive):
    """Writes one shard. The same samples always produce the same bytes.

    The shard gets its name once it is complete; an exception leaves nothing behind. Its `.tar.idx`
    and `.tar.parts` are written with it, so `energon prepare` does not read it again.

    Args:
        path: The shard; its name must end in `.tar`.
        encode: Turns values into contents, see `energon.decode.values.encode_part`.
        checksum: Whether to store a checksum of each part, for `energon verify`.

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
            raise ConfigError(f"{path}: the name of a shard must end in .tar")
        self._encode = encode
        self._builder = ScanBuilder()
        self._crc32 = array("I") if checksum else None
        super().__init__(Sink.at(self.path), name=str(self.path), checksum=checksum)

    def write(self, sample: Mapping[str, Any]) -> int:
        """Append a sample: its `__key__` and a value for each part, see `encode_sample`.

        Returns:
            The number of bytes by which the shard grew.

        Raises:
            ConfigError: If the sample cannot be written.
            DuplicateSampleKeyError: If the shard has one with this key.
        """
        encoded = encode_sample(sample, self._encode)
        self.write_encoded(encoded)
        return encoded.num_bytes

    def close(self) -> None:
        """Finish the shard and write its index. A shard without samples is not written."""
        if self.num_samples:
            super().close()
        else:
            self.abort()

    def _add(self, key: str, part: EncodedPart) -> None:
        start = self._archive.num_bytes
        crc32 = self._archive.add(part.header, part.content, part.size)
        if self._crc32 is not None:
            self._crc32.append(crc32)
        key_bytes, name = map(os.fsencode, (key, part.name))
        self._builder.add(key_bytes, name, start, start + len(part.header), part.size)

    def _complete(self, sink: Sink) -> None:
        info = self.path.stat()
        crc32 = None if self._crc32 is None else np.array(self._crc32, np.uint32)
        scan = self._builder.finish(info.st_size, crc32)
        table = PartTable.from_scan(scan, shard_mtime_ns=info.st_mtime_ns)
        for path, content in index_contents(self.path, table):
            write_atomic(path, content)


MAX_COUNT = 100_000
MAX_SIZE = 3_000_000_000


A = TypeVar("A", bound=SampleArchive)


class NumberedArchives(ClosesAtExit, Generic[A]):
    """Samples in numbered archives. Each is opened with its first sample.

    Args:
        pattern: Paths or addresses of the archives, with the number as in `%05d`.
        maxcount: Maximum number of samples in an archive.
        maxsize: Maximum size of an archive in bytes; only a single larger sample exceeds it.
        start_shard: Number of the first archive.
        post: Called with the path of each complete archive.
        end_bytes: How much of the maximum size the end of an archive takes.

    Raises:
        ConfigError: If the pattern contains no number, or a limit is not positive.
    """

    def __init__(
        self,
        pattern: str,
        *,
        maxcount: int,
        maxsize: float,
        start_shard: int,
        post: Callable[[str], object] | None,
        end_bytes: int = 0,
    ) -> None:
        self.pattern = pattern
        self.maxcount = maxcount
        self.maxsize = maxsize
        self.post = post
        self.shard = start_shard
        """Number of the next archive."""
        self.shards: list[str] = []
        """Complete archives."""
        self.fname: str | None = None
        """The archive that is being written."""
        self._archive: A | None = None
        self._end_bytes = end_bytes
        if maxcount < 1 or maxsize < 1 or start_shard < 0:
            raise ConfigError(
                f"expected a maxcount and maxsize of at least 1 and a start_shard of at least 0, "
                f"found {maxcount=}, {maxsize=}, {start_shard=}"
            )
        if self._path(0) == self._path(1):
            raise ConfigError(
                f"{redact(pattern)!r} gives all shards the same name; expected a pattern such as "
                "shards/%05d.tar"
            )

    @property
    def unfinished(self) -> str | None:
        """The incomplete archive and how many samples it has; None if there is none."""
        return None if self._archive is None else self._archive.unfinished

    @abstractmethod
    def _open(self, name: str) -> A:
        """Return a new archive."""

    def _begin(self) -> A:
        """Finish the current archive and begin the next."""
        self.finish()
        name = self._path(self.shard)
        archive = self._archive = self._open(name)
        archive.is_owned = True
        self.fname = name
        self.shard += 1
        return archive

    def _write(self, encoded: EncodedSample) -> None:
        """Write an encoded sample to the current archive, or the next if that is full."""
        archive = self._archive
        size = encoded.num_bytes + self._end_bytes
        if archive is None or (
            archive.num_samples
            and (archive.num_samples >= self.maxcount or archive.num_bytes + size > self.maxsize)
        ):
            archive = self._begin()
        archive.write_encoded(encoded)

    def finish(self) -> None:
        """Finish the current archive."""
        if self._archive is None or self.fname is None:
            return
        archive, name = self._archive, self.fname
        self._archive = self.fname = None
        self._close(archive)
        self.shards.append(name)
        if self.post is not None:
            self.post(name)

    def _close(self, archive: A) -> None:
        archive.close()

    def close(self) -> None:
        """Finish the last archive."""
        self.finish()

    def abort(self) -> None:
        """Keep complete archives, and delete the incomplete one."""
        if self._archive is not None:
            self._archive.abort()
            self._archive = self.fname = None

    def _path(self, number: int) -> str:
        try:
            return self.pattern % number
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{redact(self.pattern)!r} has no place for the number of a shard ({error}); "
                "expected a pattern such as shards/%05d.tar"
            ) from error


class ShardWriter(NumberedArchives[TarWriter]):
    """Writes samples to numbered shards, each with its index, see `TarWriter`.

    The output depends only on the samples. An interrupted run, even by kill -9, leaves complete
    shards behind; with `resume`, the next run continues after them, and the result is the same as
    without the interruption:

        with ShardWriter("coco/shards/%05d.tar", maxcount=10_000, resume=True) as writer:
            for sample in itertools.islice(samples, writer.num_samples, None):
                writer.write(sample)

    Args:
        pattern: Paths of the shards, with the number as in `%05d`. Folders are created.
        maxcount: Maximum number of samples in a shard.
        maxsize: Maximum size of a shard in bytes, including headers; only a single larger sample
            exceeds it.
        start_shard: Number of the first shard.
        resume: Whether to continue after the existing shards.
        overwrite: Whether to delete existing shards.
        post: Called with the path of each complete shard.
        encode: Turns values into contents, see `energon.decode.values.encode_part`.
        checksum: Whether to store a checksum of each part, for `energon verify`.

    Raises:
        ConfigError: If the arguments are invalid, or such shards exist and neither `resume` nor
            `overwrite` is set.

    Example:
        >>> with ShardWriter("written/%03d.tar", maxcount=2) as writer:
        ...     for number in range(3):
        ...         size = writer.write({"__key__": str(number), "txt": f"text {number}"})
        >>> [path.rpartition("/")[2] for path in writer.shards]
        ['000.tar', '001.tar']
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        maxcount: int = MAX_COUNT,
        maxsize: float = MAX_SIZE,
        *,
        start_shard: int = 0,
        resume: bool = False,
        overwrite: bool = False,
        post: Callable[[str], object] | None = None,
        encode: Encode = encode_part,
        checksum: bool = True,
    ) -> None:
        if is_remote(pattern):
            raise ConfigError(
                f"{redact(pattern)}: shards are written on this machine; upload each when it is "
                "complete, as with post=lambda path: EPath(path).copy(folder / EPath(path).name)"
            )
        super().__init__(
            local_path(pattern),
            maxcount=maxcount,
            maxsize=maxsize,
            start_shard=start_shard,
            post=post,
        )
        self.num_samples = 0
        """Samples of all shards so far, including those of earlier runs when resuming."""
        self.last_key: str | None = None
        """Key of the last sample, from an earlier run when resuming."""
        self._encode = encode
        self._checksum = checksum
        if resume and overwrite:
            raise ConfigError("resume keeps existing shards, overwrite deletes them: choose one")
        Path(self._path(start_shard)).parent.mkdir(parents=True, exist_ok=True)
        self._handle_existing(resume=resume, overwrite=overwrite)
        self.close_at_exit()

    def write(self, sample: Mapping[str, Any]) -> int:
        """Write a sample: its `__key__` and a value for each part.

        Returns:
            The number of bytes it takes.

        Raises:
            ConfigError: If it cannot be written.
            DuplicateSampleKeyError: If the shard has a sample with this key.
        """
        encoded = encode_sample(sample, self._encode)
        self._write(encoded)
        self.num_samples += 1
        self.last_key = encoded.key
        return encoded.num_bytes

    def _open(self, name: str) -> TarWriter:
        return TarWriter(name, encode=self._encode, checksum=self._checksum)

    def _close(self, archive: TarWriter) -> None:
        if archive.path.exists():
            archive.abort()
            raise ConfigError(
                f"{archive.path} did not exist when this writer began: another process writes to "
                "the same names; give each writer its own pattern"
            )
        try:
            archive.close()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{error.filename} was deleted while it was written: another process that writes "
                "to the same names considers it left over from a killed run; give each writer its "
                "own pattern"
            ) from error

    def _handle_existing(self, *, resume: bool, overwrite: bool) -> None:
        """Count, delete or refuse the shards that exist."""
        while os.path.exists(path := self._path(self.shard + len(self.shards))):
            self.shards.append(path)
        if self.shards and not (resume or overwrite):
            raise ConfigError(
                f"{self.shards[0]} already exists ({counted(len(self.shards), 'such shard')}); "
                "pass resume=True to continue after them, overwrite=True to delete them, or choose "
                "another start_shard"
            )
        if resume or overwrite:
            names = {os.path.basename(shard) for shard in (*self.shards, path)}
            remove_leftovers(
                Path(path).parent,
                lambda name: name.removesuffix(".idx").removesuffix(".parts") in names,
            )
        if overwrite:
            for path in reversed(self.shards):
                for index in index_paths(Path(path)):
                    index.unlink(missing_ok=True)
                os.unlink(path)
            self.shards = []
        for path in self.shards:
            table = index_shard(path, checksum=self._checksum)
            self.num_samples += table.num_samples
            self.last_key = table.key_of(table.num_samples - 1)
        self.shard += len(self.shards)
