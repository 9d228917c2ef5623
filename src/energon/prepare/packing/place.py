"""Files and folders that are packed, on this machine or in a store."""

from __future__ import annotations

import io
from typing import BinaryIO

from energon.errors import DatasetNotFoundError
from energon.formats.info import META
from energon.io.epath import AnyPath, EPath
from energon.io.files import list_files as list_objects
from energon.io.range_file import RemoteFile
from energon.io.raw_reader import RawReader
from energon.io.skipping_reader import SkippingReader
from energon.prepare.files import list_files

BUFFER_BYTES = 1 << 20


def names_below(folder: AnyPath) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted; none of `.nv-meta`.

    Raises:
        DatasetNotFoundError: If there is no such folder.
        StorageError: If the place cannot say what it has, as web servers cannot.
    """
    if not isinstance(folder, EPath):
        return list_files(folder)
    names = [found.key for found in list_objects(folder) if found.key]
    if not names:
        raise DatasetNotFoundError(f"{folder}: no such file or folder")
    return [name for name in names if META not in name.split("/")[:-1]]


def open_ascending(path: AnyPath) -> BinaryIO:
    """Open a file to read it from the beginning to the end, maybe with jumps.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If it cannot be read.
    """
    if not isinstance(path, EPath):
        return open(path, "rb")
    file = RemoteFile(path.url)
    reader = SkippingReader(file.object)

    def read(start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        # Requests do not end at Ctrl-C, waiting for those of other threads does.
        count = file.object.store.submit(reader.read_into, start, memoryview(data)).result()
        return bytes(data[:count])

    return io.BufferedReader(RawReader(read, file.info.size, file.path), BUFFER_BYTES)
