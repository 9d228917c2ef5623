"""Remote objects as files: for libraries that want to read, seek or write one."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from energon.io.address import redact
from energon.io.raw_reader import RawReader
from energon.io.registry import open_store

BUFFER_BYTES = 1 << 20
"""What is fetched at a time; small reads are served from it."""


def open_reader(address: str) -> io.BufferedReader:
    """Return an object as a file to read from. It is the version that there is now."""
    store, key = open_store(address)
    info = store.info(key)

    def read(start: int, stop: int) -> bytes:
        return store.read_range(key, start, stop, version=info.version)

    return io.BufferedReader(RawReader(read, info.size, redact(address)), BUFFER_BYTES)


def open_writer(address: str) -> io.RawIOBase:
    """Return a file whose content becomes the object when it is closed without an error."""
    return _Upload(address)


def open_text_writer(address: str) -> io.TextIOWrapper:
    """Return the same for text in UTF-8."""
    return _TextUpload(_Upload(address))


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
