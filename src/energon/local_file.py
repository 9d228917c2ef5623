"""Open the files of this machine: regular ones, mapped without a descriptor, or text in UTF-8.

A pipe or device among the files of a dataset would block `open`, or never end.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

from energon.errors import ConfigError, FormatError, StorageError

MIN_OPEN_FILES = 64
"""A process with a smaller limit cannot train: the interpreter and its workers need most of it."""
MAX_OPEN_FILES = 4096
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a regular file.

    Raises:
        OSError: If it cannot be opened, or is a folder.
        StorageError: If it is a pipe, a socket or a device.
        ConfigError: If this process may not open enough files.
    """
    open_files_limit()
    try:
        # A pipe without a writer would block. For regular files, O_NONBLOCK has no meaning.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise too_many_open_files(path) from error
        if error.errno == errno.ENXIO:  # sockets cannot be opened at all
            raise _not_regular(path, os.stat(path).st_mode) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise _not_regular(path, mode)


def open_binary(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Return a regular file, open for reading; see `open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb", buffering)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file; see `open_descriptor`."""
    with open_binary(path) as file:
        return file.read()


def decode_utf8(data: bytes, *, origin: str) -> str:
    """Return the text of a file.

    Args:
        data: All that is in it.
        origin: Its name in messages.

    Raises:
        FormatError: If it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(
            f"{origin}:{line}: found {data[error.start : error.end]!r}, expected text in UTF-8; "
            "the file is damaged or of another encoding, restore it or save it as UTF-8"
        ) from error


def _not_regular(path: str | os.PathLike[str], mode: int) -> StorageError:
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    return StorageError(
        f"{os.fspath(path)}: is {kind}, expected a regular file; remove it from the dataset"
    )


def open_files_limit() -> int:
    """Return how many files this process may open.

    Raises:
        ConfigError: If they are too few.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 20
    if limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"this process may open only {limit} files, and energon needs at least "
            f"{MIN_OPEN_FILES}; raise the limit, for example with `ulimit -n 1024`"
        )
    return limit


def too_many_open_files(path: str | os.PathLike[str]) -> StorageError:
    """Return the error for a file that exceeds the limit of this process."""
    return StorageError(
        f"{os.fspath(path)}: cannot be opened, because this process has as many open files as it "
        f"may, {open_files_limit()}; raise the limit, for example with `ulimit -n 4096`, or close "
        "files of your own"
    )


def working_folder() -> str:
    """Return the folder that relative paths begin at.

    Raises:
        StorageError: If it was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise StorageError(
            "the working folder of this process was deleted; go to a folder that exists, for "
            "example with `cd`, and start again"
        ) from error


def map_file(path: str | os.PathLike[str]) -> memoryview | bytes:
    """Return the bytes of a regular file, mapped into memory; see `open_descriptor`.

    The mapping needs no descriptor, unlike those of `mmap.mmap`, so any number of files can be
    mapped. It ends with its last view.
    """
    import numpy as np  # here, so that commands start without it

    descriptor = open_descriptor(path)
    try:
        size = os.fstat(descriptor).st_size
        # What is empty cannot be mapped.
        return np.asarray(_Mapping(descriptor, size)).data if size else b""
    finally:
        os.close(descriptor)


def map_writable(descriptor: int, size: int) -> memoryview:
    """Return the bytes of an open file, mapped to be written and shared; see `map_file`."""
    import numpy as np

    return np.asarray(_Mapping(descriptor, size, is_writable=True)).data


def release_pages(view: memoryview | bytes) -> None:
    """Let the system drop the pages of a mapped file from the memory of this process."""
    base = getattr(getattr(view, "obj", None), "base", None)
    if isinstance(base, _Mapping) and hasattr(mmap, "MADV_DONTNEED"):
        _library.madvise(base.address, base.size, mmap.MADV_DONTNEED)


_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The mapped bytes of a file, as numpy takes them."""

    def __init__(self, descriptor: int, size: int, *, is_writable: bool = False) -> None:
        self.size = 0
        self._is_writable = is_writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        address = _library.mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address, self.size = address, size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, not self._is_writable)
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": data}

    def __del__(self, unmap: Callable[[int, int], Any] = _library.munmap) -> None:
        # The module may be gone when the interpreter ends.
        if self.size:
            unmap(self.address, self.size)
