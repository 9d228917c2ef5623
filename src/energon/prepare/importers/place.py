"""Read files from the beginning to the end, on this machine or in a store."""

from __future__ import annotations

import io
from typing import BinaryIO

from energon.io.epath import AnyPath, EPath
from energon.io.range_file import RemoteFile
from energon.io.readers import RawReader, SkippingReader

BUFFER_BYTES = 1 << 20


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
