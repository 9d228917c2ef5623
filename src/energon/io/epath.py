"""`EPath`: a path that may be anywhere."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from functools import partial, total_ordering
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self, cast

from energon.errors import ConfigError, DatasetNotFoundError
from energon.io import files
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    local_path,
    parent_address,
    redact,
    split_address,
)
from energon.io.backends.base import ObjectInfo
from energon.io.backends.local import PathPattern
from energon.io.files import open_store
from energon.io.range_file import REMOTE_BUFFER_BYTES, RawReader
from energon.local_file import open_binary


def open_writer(address: str) -> io.RawIOBase:
    """Return a file whose content becomes the object when it is closed without an error."""
    return _Upload(address)


class _Upload(io.RawIOBase):
    def __init__(self, address: str) -> None:
        self._store, self._key = open_store(address)
        self._file = tempfile.NamedTemporaryFile(prefix="energon-upload-")  # noqa: SIM115
        self._failed = False
        self.name = redact(address)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
        self.close()

    def abort(self) -> None:
        """Discard what was written; an existing object stays as it is."""
        self._failed = True
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._failed:
                self._file.flush()
                self._store.write(self._key, Path(self._file.name))
        finally:
            self._file.close()
            super().close()

    def __del__(self) -> None:
        self.abort()  # a file that was not closed may be incomplete


class _TextUpload(io.TextIOWrapper):
    def __init__(self, upload: _Upload) -> None:
        super().__init__(upload, encoding="utf-8", newline="")
        self._upload = upload

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._upload.abort()
        self.close()

    def __del__(self) -> None:
        self._upload.abort()
        self.close()


DEFAULT_PROFILE_NAME = "__filesystem__"
"""The profile that local paths belong to."""


@total_ordering
class EPath:
    """A path on this machine, in an object store, or on a web server.

    Immutable and picklable. It holds no credentials beyond those written into the URL; `str()`
    hides them, `url` and `os.fspath` do not.

    Example:
        dataset = EPath("s3://bucket/coco")
        (dataset / "notes.txt").write_text("Every object is written as a whole.")
        shards = [path.url for path in dataset.glob("shards/*.tar")]

    Args:
        initial_path: A path or a URL; see `docs/storage.md` for the schemes.

    Raises:
        ConfigError: If the URL has no bucket or host.
    """

    __slots__ = ("_address",)

    def __init__(self, initial_path: str | os.PathLike[str]) -> None:
        text = os.fspath(initial_path)
        if is_remote(text):
            split_address(text)
            self._address = join_address(text, ".")
        else:
            self._address = os.path.abspath(local_path(text))

    @property
    def url(self) -> str:
        """The address, including any secrets in it."""
        return self._address

    @property
    def name(self) -> str:
        """The last part of the path."""
        return address_name(self._address)

    @property
    def suffix(self) -> str:
        """The last suffix of the name, with its dot, or nothing."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> EPath:
        """The folder that contains it."""
        return type(self)(parent_address(self._address))

    @property
    def profile(self) -> str:
        """Which store it belongs to, without secrets."""
        if self.is_local():
            return DEFAULT_PROFILE_NAME
        return redact(split_address(self._address).root)

    def is_local(self) -> bool:
        """Return whether it is a path on this machine."""
        return not is_remote(self._address)

    def absolute(self) -> Self:
        """Return this path: relative ones are resolved when they are created."""
        return self

    def is_absolute(self) -> bool:
        """Return True, see `absolute`."""
        return True

    def local_path(self) -> Path:
        """Return it as a `pathlib.Path`.

        Raises:
            ConfigError: If it is not on this machine.
        """
        return Path(local_path(self._address))

    def __truediv__(self, other: str | os.PathLike[str]) -> EPath:
        return type(self)(join_address(self._address, os.fspath(other)))

    def with_suffix(self, suffix: str) -> EPath:
        """Return the path with another last suffix; none if `suffix` is empty."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def relative_to(self, other: EPath) -> str:
        """Return the rest of the path below `other`.

        Raises:
            ValueError: If it is not below `other`.
        """
        mine, theirs = self._parts(), other._parts()
        if mine[0] != theirs[0]:
            raise ValueError(f"{self} and {other} are in different places")
        return str(PurePosixPath(mine[1]).relative_to(theirs[1]))

    def is_relative_to(self, other: EPath) -> bool:
        """Return whether it is `other`, or below it."""
        try:
            self.relative_to(other)
        except ValueError:
            return False
        return True

    def open(
        self, mode: str = "r", block_size: int | None = None, prefetch_file: bool = False
    ) -> IO[Any]:
        """Open the file in mode "r", "rb", "w" or "wb".

        A written file appears as a whole when it is closed, and not at all after an exception.
        `block_size` and `prefetch_file` have no effect.

        Raises:
            DatasetNotFoundError: If there is nothing to read.
        """
        if mode not in ("r", "rb", "w", "wb"):
            raise ConfigError(f"{self}: mode is {mode!r}, expected 'r', 'rb', 'w' or 'wb'")
        if mode == "w":
            return _TextUpload(_Upload(self.url))
        if mode == "wb":
            return cast(IO[Any], open_writer(self.url))
        store, key = open_store(self.url)
        info = store.info(key)
        read = partial(store.read_range, key, version=info.version)
        binary = io.BufferedReader(RawReader(read, info.size, str(self)), REMOTE_BUFFER_BYTES)
        return binary if mode == "rb" else io.TextIOWrapper(binary, encoding="utf-8")

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        return files.read_bytes(self._address)

    def read_document(self) -> bytes:
        """Return the content of a document, up to the size limit for documents."""
        return files.read_document(self._address)

    def read_text(self) -> str:
        """Return the content of the file as text."""
        return self.read_bytes().decode()

    def write_bytes(self, data: bytes) -> None:
        """Write the file atomically: readers see the old content or the new."""
        files.write_bytes(self._address, data)

    def write_text(self, text: str) -> None:
        """Write the file as text."""
        self.write_bytes(text.encode())

    def copy(self, target: EPath) -> None:
        """Copy the file to `target`, wherever that is."""
        if self.is_local():
            files.write_bytes(target.url, self.local_path())
        else:
            with self.open("rb") as source, target.open("wb") as sink:
                while chunk := source.read(8 << 20):
                    sink.write(chunk)

    def move(self, target: EPath) -> None:
        """Copy the file to `target`, then delete it here."""
        self.copy(target)
        self.unlink()

    def unlink(self) -> None:
        """Delete the file, if it exists."""
        files.delete_file(self._address)

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Do nothing: folders are created with the files in them."""

    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return files.is_file(self._address)

    def is_dir(self) -> bool:
        """Return whether it is a folder; in object stores, whether anything is below it."""
        if self.is_local():
            return self.local_path().is_dir()
        return files.has_files(self._address)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.stat().size

    def stat(self) -> ObjectInfo:
        """Return size, version and time of the file.

        Raises:
            DatasetNotFoundError: If there is none.
        """
        info = files.file_info(self._address)
        if info is None:
            raise DatasetNotFoundError(f"{self}: there is no such file")
        return info

    def walk(self) -> Iterator[EPath]:
        """Yield all files below this folder, sorted."""
        for info in files.list_files(self._address):
            yield self / info.key

    def glob(self, pattern: str) -> Iterator[EPath]:
        """Yield the files below this folder whose path matches; `**` stands for any folders."""
        fits = PathPattern(pattern).matches
        for info in files.list_files(self._address):
            if fits(info.key):
                yield self / info.key

    def __fspath__(self) -> str:
        return self._address

    def __str__(self) -> str:
        return redact(self._address)

    def __repr__(self) -> str:
        return f"EPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EPath) and self._address == other._address

    def __lt__(self, other: EPath) -> bool:
        return self._parts() < other._parts()

    def __hash__(self) -> int:
        return hash(self._address)

    def __reduce__(self) -> tuple[type[EPath], tuple[str]]:
        return type(self), (self._address,)

    def _parts(self) -> tuple[str, str]:
        if self.is_local():
            return "", self._address
        parts = split_address(self._address)
        return parts.root, parts.key


AnyPath = Path | EPath


def open_file(path: AnyPath) -> IO[bytes]:
    """Return a file, open for reading.

    Raises:
        DatasetNotFoundError: If there is none in a store; on this machine, FileNotFoundError.
        StorageError: If it is not a regular file, or cannot be read.
    """
    return path.open("rb") if isinstance(path, EPath) else open_binary(path)


def any_path(path: str | os.PathLike[str]) -> AnyPath:
    """Return a `pathlib.Path` for a local address, else an `EPath`.

    The two share the methods needed to read and write files by name.
    """
    return EPath(path) if is_remote(path) else Path(local_path(path))
