"""Read ranges of local files without opening them again each time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import ClassVar

from energon.errors import DatasetNotFoundError, TruncatedError

MAX_OPEN_FILES = 256
TRUSTED_BYTES = 1 << 20


class FilePool:
    """Open files, the least recently used of which are closed. May be used by many threads.

    Files belong to the process that opened them: a forked child opens its own.

    Args:
        max_open: How many files to keep open.
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
        """Return how many bytes a file has.

        Raises:
            DatasetNotFoundError: If there is no such file.
        """
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            raise _missing(path) from None

    def open(self, path: str) -> OpenFile:
        """Return a file to read from. It stays open for as long as it is held.

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
                    # Whoever reads from it still holds it; it is closed after that.
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(path)
            return file


class OpenFile:
    """A file that closes with its last user."""

    is_remote: ClassVar[bool] = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(path) from None

    def pread(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes from `offset`.

        Raises:
            TruncatedError: If the file ends earlier.
        """
        # Memory is taken for what is asked for, so large sizes are compared with the file first.
        if size > TRUSTED_BYTES and offset + size > (end := os.fstat(self.descriptor).st_size):
            raise cut_off(self.path, end, offset, size)
        data = os.pread(self.descriptor, size, offset)
        while len(data) < size:
            # Linux returns at most 2 GiB at once.
            more = os.pread(self.descriptor, size - len(data), offset + len(data))
            if not more:
                raise cut_off(self.path, offset + len(data), offset, size)
            data += more
        return data

    def pread_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes with those from `offset` on.

        Raises:
            TruncatedError: If the file ends earlier.
        """
        if not hasattr(os, "preadv"):  # macOS
            buffer[:] = self.pread(offset, len(buffer))
            return
        done = os.preadv(self.descriptor, [buffer], offset)
        while done < len(buffer):
            more = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            if not more:
                raise cut_off(self.path, offset + done, offset, len(buffer))
            done += more

    def will_read(self, offset: int, size: int) -> None:
        """Let the system fetch a range from the disk, if it is not in memory yet."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def pread_many(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
        """Return several ranges, see `pread`."""
        return list(map(self.pread, offsets, sizes))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def cut_off(path: str, end: int, offset: int, size: int) -> TruncatedError:
    """Return the error that a file which ends at byte `end` does not have a range."""
    return TruncatedError(
        f"{path}: ends at byte {end}, expected {size} bytes from byte {offset}; the file is cut "
        f"off or changed since it was indexed, restore it or run `energon prepare` again"
    )


def _missing(path: str) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"{path}: no such file, but the dataset lists it; restore it, or run `energon prepare` "
        "again without it"
    )
