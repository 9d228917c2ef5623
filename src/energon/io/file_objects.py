"""Remote objects as files: for libraries that want to read, seek or write one."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from energon.io.address import redact
from energon.io.registry import open_store

BUFFER_BYTES = 1 << 20
"""What is fetched at a time; small reads are served from it."""


def open_reader(address: str) -> io.BufferedReader:
    """Return an object as a file to read from. It is the version that there is now."""
    return io.BufferedReader(_RangeReader(address), BUFFER_BYTES)


def open_writer(address: str) -> io.RawIOBase:
    """Return a file whose content becomes the object when it is closed without an error."""
    return _Upload(address)


def open_text_writer(address: str) -> io.TextIOWrapper:
    """Return the same for text in UTF-8."""
    return _TextUpload(_Upload(address))


class _RangeReader(io.RawIOBase):
    def __init__(self, address: str) -> None:
        self._store, self._key = open_store(address)
        self._info = self._store.info(self._key)
        self._position = 0
        self.name = redact(address)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.name}: cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self._read(self._position, min(self._info.size, self._position + len(view)))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self._read(self._position, self._info.size)
        self._position += len(data)
        return data

    def _read(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        return self._store.read_range(self._key, start, stop, version=self._info.version)


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def discard(self) -> None:
        """Leave the object as it is, whatever has been written."""
        self._failed = True

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
        # What nobody closed may be incomplete.
        self.discard()
        self.close()


class _TextUpload(io.TextIOWrapper):
    def __init__(self, upload: _Upload) -> None:
        super().__init__(upload, encoding="utf-8", newline="")
        self._upload = upload

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._upload.discard()
        self.close()

    def __del__(self) -> None:
        self._upload.discard()
        self.close()
