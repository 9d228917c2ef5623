"""Files on this machine: ranges of open files for the hot path, and a backend among others."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from threading import Lock
from typing import ClassVar

from energon.errors import (
    DatasetNotFoundError,
    EnergonError,
    ObjectChangedError,
    StorageAccessError,
    StorageError,
    TruncatedError,
)
from energon.io.atomic import atomic_path
from energon.io.backends.base import INDEX_AGAIN, ObjectInfo

MAX_OPEN_FILES = 256
TRUSTED_BYTES = 1 << 20


class FilePool:
    """A pool of open files that closes the least recently used. May be used by many threads.

    Files belong to the process that opened them: a forked child opens its own.

    Args:
        max_open: Maximum number of open files.
    """

    def __init__(self, max_open: int = MAX_OPEN_FILES) -> None:
        self.max_open = max_open
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = Lock()
        self._pid = os.getpid()

    def pread(self, path: str, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes of a file from `offset`, see `OpenFile.pread`."""
        return self.open(path).pread(offset, size)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            DatasetNotFoundError: If there is no such file.
        """
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            raise _missing(path) from None

    def open(self, path: str) -> OpenFile:
        """Return a file to read from. It stays open as long as it is referenced.

        Raises:
            DatasetNotFoundError: If there is no such file.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._files.clear()
                self._pid = os.getpid()
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = OpenFile(path)
                if len(self._files) > self.max_open:
                    # Readers still hold a reference; the file is closed with the last.
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file


class OpenFile:
    """A file that closes with its last reference."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(path) from None
        except OSError as error:
            raise local_error(path, error) from error

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            TruncatedError: If the file ends earlier.
        """
        # Reading allocates the requested size, so large ones are checked against the file first.
        if size > TRUSTED_BYTES and offset + size > (end := os.fstat(self.descriptor).st_size):
            raise cut_off(self.path, end, offset, size)
        try:
            data = os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise local_error(self.path, error) from error
        while len(data) < size:
            # Linux returns at most 2 GiB at once.
            more = os.pread(self.descriptor, size - len(data), offset + len(data))
            if not more:
                raise cut_off(self.path, offset + len(data), offset, size)
            data += more
        return data

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`.

        Raises:
            TruncatedError: If the file ends earlier.
        """
        filled = 0
        while filled < len(buffer):
            # Linux returns at most 2 GiB at once.
            read = os.preadv(self.descriptor, [buffer[filled:]], offset + filled)
            if not read:
                raise cut_off(self.path, offset + filled, offset, len(buffer))
            filled += read

    def will_read(self, offset: int, size: int) -> None:
        """Ask the system to load a range from disk, unless it is in memory."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, see `pread`."""
        if max(sizes, default=0) > TRUSTED_BYTES:
            return list(map(self.pread, offsets, sizes))
        try:
            # A call of our own for each would take as long as copying a kilobyte.
            found = list(map(os.pread, repeat(self.descriptor), sizes, offsets))
        except OSError as error:
            raise local_error(self.path, error) from error
        if list(map(len, found)) != list(sizes):
            return list(map(self.pread, offsets, sizes))  # says which range is cut off
        return found

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os` may be gone when the interpreter ends.
        if self.descriptor >= 0:
            close(self.descriptor)


def cut_off(path: str, end: int, offset: int, size: int) -> TruncatedError:
    """Return the error for a range that a file ending at byte `end` does not have."""
    return TruncatedError(
        f"{path}: ends at byte {end}, expected {size} bytes from byte {offset}; the file is "
        f"truncated or has changed, restore it, {INDEX_AGAIN}"
    )


def _missing(path: str) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"{path}: no such file, but the dataset lists it; restore it, {INDEX_AGAIN}"
    )


LOCAL_CHUNK_BYTES = 1 << 20


class LocalBackend:
    """Files below a folder.

    Args:
        folder: What keys are relative to.
    """

    can_range = True
    can_list = True

    def __init__(self, folder: str = "/") -> None:
        self.origin = self._folder = folder

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        with self._errors(key), open(self._path(key), "rb") as file:
            self._check(file.fileno(), key, version)
            return os.pread(file.fileno(), max(0, stop - start), start)

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        with self._errors(key), open(self._path(key), "rb") as file:
            self._check(file.fileno(), key, version)
            file.seek(start)
            while chunk := file.read(LOCAL_CHUNK_BYTES):
                yield chunk

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors(key):
            if os.path.isdir(path):
                raise IsADirectoryError
            return _info(key, os.stat(path))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._path(prefix)
        for folder, _, names in os.walk(top, followlinks=True):
            for name in names:
                path = os.path.join(folder, name)
                key = os.path.join(prefix, os.path.relpath(path, top))
                with self._errors(key):
                    yield _info(key, os.stat(path))

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        path = self._path(key)
        with self._errors(key):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic_path(path) as temporary:
                if isinstance(content, bytes):
                    temporary.write_bytes(content)
                else:
                    shutil.copyfile(content, temporary)

    def delete(self, key: str) -> None:
        with self._errors(key):
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                return

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key)

    def _check(self, descriptor: int, key: str, version: str | None) -> None:
        found = _info(key, os.fstat(descriptor)).version
        if version is not None and version != found:
            raise ObjectChangedError(
                f"{self._path(key)}: was rewritten since it was opened; run again"
            )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise local_error(self._path(key), error) from error


def local_error(path: str, error: OSError) -> EnergonError:
    """Return the error for a file that the system does not let us read or write."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DatasetNotFoundError(f"{path}: no such file")
    if isinstance(error, IsADirectoryError):
        return DatasetNotFoundError(f"{path}: is a folder, expected a file")
    if isinstance(error, PermissionError):
        return StorageAccessError(f"{path}: permission denied; this user may not read the file")
    return StorageError(f"{path}: {error.strerror}")


def _info(key: str, about: os.stat_result) -> ObjectInfo:
    version = f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"
    return ObjectInfo(key, about.st_size, version, about.st_mtime_ns)
