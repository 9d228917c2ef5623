"""Objects of stores and web servers as streams."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon.errors import StorageError
from energon.io.address import redact
from energon.io.atomic import ClosesOrAborts
from energon.io.registry import open_store
from energon.io.threads import check_process

_CHUNK_BYTES = 1 << 20


class RemoteReader:
    """The bytes of an object, from any position. Broken connections are continued.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._store, self._key = open_store(url)
        self._chunks: Iterator[bytes] = iter(())
        self._rest = b""
        # Opened here, so that what does not exist is noticed here.
        self.seek(0)

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes; none at the end only."""
        if size < 0:
            return self._rest + b"".join(self._chunks)
        data = self._rest or next(self._chunks, b"")
        self._rest = data[size:]
        return data[:size]

    def seekable(self) -> bool:
        """Return whether reading may go on anywhere."""
        return self._store.backend.can_range

    def seek(self, position: int) -> int:
        """Go on at byte `position`."""
        self.close()
        self._chunks = iter(self._stream(position))
        self._rest = next(self._chunks, b"")
        return position

    def close(self) -> None:
        """Close the connection."""
        if hasattr(self._chunks, "close"):
            self._chunks.close()
        self._rest = b""

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(self, position: int) -> Iterator[bytes]:
        try:
            check_process(redact(self._url))
        except StorageError:
            return _from_another_process(self._url, position)
        return self._store.stream(self._key, position)


def _from_another_process(url: str, position: int) -> Iterator[bytes]:
    """Yield the bytes of an object that this process, a fork, cannot ask for.

    torch's DataLoader forks its workers, also from programs that have read from a store before.
    """
    command = [sys.executable, "-m", "energon.webdataset.reading.remote_cat", url, str(position)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        if process.stdout is None or process.stderr is None:
            return
        try:
            while chunk := process.stdout.read(_CHUNK_BYTES):
                yield chunk
            if process.wait():
                said = process.stderr.read().decode(errors="replace").strip()
                raise StorageError(said or f"{redact(url)}: the process that reads it has died")
        finally:
            process.kill()


class RemoteWriter(ClosesOrAborts):
    """Writes an object, that is there as a whole after `close`, and not before.

    Args:
        url: Its address.
    """

    def __init__(self, url: str) -> None:
        self._store, self._key = open_store(url)
        descriptor, self._path = tempfile.mkstemp(prefix="energon-upload-")
        self._file = os.fdopen(descriptor, "wb")

    def write(self, data: Any) -> int:
        """Append bytes."""
        return self._file.write(data)

    def flush(self) -> None:
        """Do nothing: objects have no parts."""

    def close(self) -> None:
        """Write the object."""
        if self._file.closed:
            return
        self._file.close()
        try:
            self._store.write(self._key, Path(self._path))
        finally:
            os.unlink(self._path)

    def abort(self) -> None:
        """Leave everything as it was."""
        if not self._file.closed:
            self._file.close()
            os.unlink(self._path)
