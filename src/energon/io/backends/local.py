"""Files on this machine: ranges of open files, patterns and walks of folders, and a backend.

Reading and packing share one rule: files and folders whose names begin with a dot belong to tools
(`.git`, `.ipynb_checkpoints`, `.nv-meta`) and are skipped, unless a pattern names them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import translate
from itertools import repeat
from stat import S_ISDIR
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
from energon.limits import WALKED_ENTRIES, WALKED_SECONDS
from energon.local_file import MAX_OPEN_FILES, open_binary, open_descriptor, open_files_limit
from energon.messages import warn_once

logger = logging.getLogger("energon")

TRUSTED_BYTES = 1 << 20


class _Descriptor:
    """An open file, which closes with its last reference."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = -1
        self.number = open_descriptor(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `os` may be gone when the interpreter ends.
        if self.number >= 0:
            close(self.number)


class OpenFile:
    """A file to read ranges of. May be used by many threads.

    All of them together keep half of the descriptors that the process may have. Beyond that, those
    that were not used for the longest time are closed, and opened again when they are used.

    Args:
        path: The file.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it is not a regular file, or cannot be opened.
    """

    is_remote: ClassVar[bool] = False
    _kept: ClassVar[deque[weakref.ref[OpenFile]]] = deque()
    """The open files, those that were opened first at the beginning."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._held: _Descriptor | None = None
        self._was_used = False
        # The program may go to another folder before the file is opened again.
        self._absolute = path if os.path.isabs(path) else os.path.join(_working_folder(), path)
        self._version = object_info("", os.fstat(self._open().number)).version

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            TruncatedError: If the file ends earlier.
            ObjectChangedError: If the file was replaced since it was opened.
        """
        descriptor = self._descriptor()
        number = descriptor.number
        # Reading allocates the requested size, so large ones are checked against the file first.
        if size > TRUSTED_BYTES and offset + size > (end := os.fstat(number).st_size):
            raise cut_off(self.path, end, offset, size)
        try:
            data = os.pread(number, size, offset)
        except OSError as error:
            raise local_error(self.path, error) from error
        while len(data) < size:
            # Linux returns at most 2 GiB at once.
            more = os.pread(number, size - len(data), offset + len(data))
            if not more:
                raise cut_off(self.path, offset + len(data), offset, size)
            data += more
        return data

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`.

        Raises:
            TruncatedError: If the file ends earlier.
            ObjectChangedError: If the file was replaced since it was opened.
        """
        descriptor = self._descriptor()
        filled = 0
        while filled < len(buffer):
            # Linux returns at most 2 GiB at once.
            read = os.preadv(descriptor.number, [buffer[filled:]], offset + filled)
            if not read:
                raise cut_off(self.path, offset + filled, offset, len(buffer))
            filled += read

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes from `offset`; return how many were read.

        Raises:
            ObjectChangedError: If the file was replaced since it was opened.
        """
        try:
            return os.preadv(self._descriptor().number, [buffer], offset)
        except OSError as error:
            raise local_error(self.path, error) from error

    def will_read(self, offset: int, size: int) -> None:
        """Ask the system to load a range from disk, unless it is in memory."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            descriptor = self._descriptor()
            os.posix_fadvise(descriptor.number, offset, size, os.POSIX_FADV_WILLNEED)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, see `pread`."""
        if max(sizes, default=0) > TRUSTED_BYTES:
            return list(map(self.pread, offsets, sizes))
        descriptor = self._descriptor()
        try:
            # A call of our own for each would take as long as copying a kilobyte.
            pieces = list(map(os.pread, repeat(descriptor.number), sizes, offsets))
        except OSError as error:
            raise local_error(self.path, error) from error
        if list(map(len, pieces)) != list(sizes):
            return list(map(self.pread, offsets, sizes))  # its error names the range
        return pieces

    def stat(self) -> os.stat_result:
        """Return size and times of the file."""
        return os.fstat(self._descriptor().number)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.stat().st_size

    def _descriptor(self) -> _Descriptor:
        """Return the open file. It is not closed before the last reference to it is gone."""
        self._was_used = True
        held = self._held
        if held is not None:
            return held
        held = self._open()
        if object_info("", os.fstat(held.number)).version != self._version:
            self._held = None
            raise ObjectChangedError(
                f"{self.path}: was replaced since it was opened; restore it, {INDEX_AGAIN}"
            )
        return held

    def _open(self) -> _Descriptor:
        try:
            held = _Descriptor(self._absolute)
        except FileNotFoundError:
            raise DatasetNotFoundError(
                f"{self.path}: no such file, but the dataset lists it; restore it, {INDEX_AGAIN}"
            ) from None
        except OSError as error:
            raise local_error(self.path, error) from error
        self._held = held
        # Appending and popping need no lock, which a forked child might never get.
        self._kept.append(weakref.ref(self))
        # Afterwards: of threads that open files at the same time, the last one sees them all.
        self._close_others()
        return held

    def _close_others(self) -> None:
        """Close the files that were not used for the longest time, as far as too many are open.

        Files used since their last turn get another one, and so does this one.
        """
        self._was_used = True
        most = min(MAX_OPEN_FILES, open_files_limit() // 2)
        for _ in range(2 * len(self._kept)):
            if len(self._kept) <= most:
                return
            try:
                other = self._kept.popleft()()
            except IndexError:  # another thread has taken the last
                return
            if other is None:
                continue
            if other._was_used:
                other._was_used = False
                self._kept.append(weakref.ref(other))
            else:
                other._held = None


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # deleted: only absolute paths work
        return ""


def cut_off(path: str, end: int, offset: int, size: int) -> TruncatedError:
    """Return the error for a range that a file ending at byte `end` does not have."""
    return TruncatedError(
        f"{path}: ends at byte {end}, expected {size} bytes from byte {offset}; the file is "
        f"truncated or has changed, restore it, {INDEX_AGAIN}"
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
        with self._errors(key), open_binary(self._path(key)) as file:
            self._check(file.fileno(), key, version)
            return os.pread(file.fileno(), max(0, stop - start), start)

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        with self._errors(key), open_binary(self._path(key)) as file:
            self._check(file.fileno(), key, version)
            file.seek(start)
            while chunk := file.read(LOCAL_CHUNK_BYTES):
                yield chunk

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors(key):
            status = os.stat(path)
            if S_ISDIR(status.st_mode):
                raise IsADirectoryError
            return object_info(key, status)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._path(prefix)
        if not os.path.isdir(top):
            return
        for path, entry in walk_files(top, hidden=True):
            key = os.path.join(prefix, path)
            with self._errors(key):
                yield object_info(key, entry.stat())

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
        current = object_info(key, os.fstat(descriptor)).version
        if version is not None and version != current:
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
    if isinstance(error, EnergonError):
        return error
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DatasetNotFoundError(f"{path}: no such file")
    if isinstance(error, IsADirectoryError):
        return DatasetNotFoundError(f"{path}: is a folder, expected a file")
    if isinstance(error, PermissionError):
        return StorageAccessError(f"{path}: permission denied; this user may not read the file")
    return StorageError(f"{path}: {error.strerror}")


def object_info(key: str, status: os.stat_result) -> ObjectInfo:
    """Return size, version and time of a file."""
    version = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    return ObjectInfo(key, status.st_size, version, status.st_mtime_ns)


_States = frozenset[int]
"""How many steps of a pattern the steps of a path may have matched."""


class PathPattern:
    """A pattern for paths: `*`, `?` and `[…]` within a name, `**` for any folders.

    Args:
        pattern: The pattern, with slashes between names.
        hidden: Whether wildcards match hidden names.

    Example:
        >>> pattern = PathPattern("**/**/*.tar")
        >>> [pattern.matches(path) for path in ("0.tar", "a/b/0.tar", "a/.b/0.tar", "a/0.txt")]
        [True, True, False, False]
    """

    def __init__(self, pattern: str, *, hidden: bool = False) -> None:
        self.pattern = pattern
        self._hidden = hidden
        steps = [step for step in pattern.split("/") if step]
        # Several `**` in a row match what one does.
        self._steps = [
            step for at, step in enumerate(steps) if step != "**" or steps[at - 1 : at] != ["**"]
        ]
        self._fits = [re.compile(translate(step)).match for step in self._steps]
        self.start = self._with_skipped({0})

    @property
    def names_hidden(self) -> bool:
        """Whether a hidden name can match."""
        return self._hidden or any(step.startswith(".") for step in self._steps)

    def matches(self, path: str) -> bool:
        """Return whether a whole path matches."""
        states = self.start
        for name in path.split("/"):
            states = self.advance(states, name)
        return self.ends(states)

    def advance(self, states: _States, name: str) -> _States:
        """Return the states after one more name of a path; none if it cannot match any more."""
        is_hidden = name.startswith(".") and not self._hidden
        reached = set()
        for state in states:
            if state == len(self._steps):
                continue
            step = self._steps[state]
            if is_hidden and not step.startswith("."):
                continue
            if step == "**":
                reached.add(state)
            elif self._fits[state](name):
                reached.add(state + 1)
        return self._with_skipped(reached)

    def ends(self, states: _States) -> bool:
        """Return whether a path matches that has led to these states."""
        return len(self._steps) in states

    def _with_skipped(self, states: set[int]) -> _States:
        """Add the states after each `**`, which may stand for no folder at all."""
        skipped = {s + 1 for s in states if s < len(self._steps) and self._steps[s] == "**"}
        return frozenset(states | skipped)


def walk_files(
    top: str, pattern: str = "**", *, hidden: bool = False
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a folder of this machine that match a pattern, in the order of paths.

    Links are followed; a folder that can be reached in several ways is visited once for each part
    of the pattern, so loops end.

    Args:
        top: The folder.
        pattern: See `PathPattern`.
        hidden: Whether to include hidden files and folders.

    Yields:
        The path of each file below `top`, and its entry; pipes and devices are included.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If there is more below it than `WALKED_ENTRIES` or `WALKED_SECONDS` allow.
    """
    path_pattern = PathPattern(pattern, hidden=hidden)
    ahead, seen = [("", path_pattern.start)], set()
    left, deadline = WALKED_ENTRIES.value, time.monotonic() + WALKED_SECONDS.value
    while ahead:
        path, states = ahead.pop()
        folder = os.path.join(top, path) if path else top
        try:
            status = os.stat(folder)
            if (visit := (status.st_dev, status.st_ino, states)) in seen:
                continue
            seen.add(visit)
            folders, files = folder_entries(folder, hidden=path_pattern.names_hidden)
        except OSError as error:
            if not path:
                raise DatasetNotFoundError(f"{top}: {error.strerror}; expected a folder") from None
            warn_once(logger, folder, "%s: left out: %s", folder, error.strerror)
            continue
        left -= len(folders) + len(files)
        if left < 0 or time.monotonic() > deadline:
            limit = WALKED_ENTRIES if left < 0 else WALKED_SECONDS
            more = "" if pattern == "**" else f", where {pattern!r} is searched for"
            raise StorageError(
                f"{top}: there is more below this folder{more} than {limit.value:,} "
                f"{limit.meaning}; name a folder further down, or set {limit.variable}"
            )
        prefix = f"{path}/" if path else ""
        for entry in files:
            if path_pattern.ends(path_pattern.advance(states, entry.name)):
                yield prefix + entry.name, entry
        for entry in reversed(folders):
            if inner := path_pattern.advance(states, entry.name):
                ahead.append((prefix + entry.name, inner))


def folder_entries(
    folder: str, *, hidden: bool = False
) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the folders directly in a folder of this machine, and everything else, by name.

    Args:
        folder: The folder.
        hidden: Whether to include hidden ones.

    Raises:
        OSError: If it cannot be listed.
    """
    with os.scandir(folder) as entries:
        own = [entry for entry in entries if hidden or not entry.name.startswith(".")]
    own.sort(key=lambda entry: entry.name)
    are_folders = list(map(_is_folder, own))
    folders = [entry for entry, is_folder in zip(own, are_folders, strict=True) if is_folder]
    files = [entry for entry, is_folder in zip(own, are_folders, strict=True) if not is_folder]
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def is_hidden(path: str) -> bool:
    """Return whether a file is hidden, or in a hidden folder."""
    return path.startswith(".") or "/." in path
