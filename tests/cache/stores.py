"""Stores for tests of caches: slow, counting, and failing ones."""

from __future__ import annotations

import threading

from energon.errors import NoSuchFileError
from energon.samples.provenance import SourceInfo
from energon.sources.files.store import FileStore


class CountingStore(FileStore[bytes]):
    """Files named by numbers, `size` bytes each; counts who reads them."""

    def __init__(self, size: int = 100, *, path: str = "/counted") -> None:
        self.size = size
        self.path = path
        self.reads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def content(self, name: str) -> bytes:
        return name.encode() * (self.size // len(name))

    def get_raw(self, name):
        assert self.gate.wait(100)
        self.reads.append(name)
        if not name.isdecimal():
            raise NoSuchFileError(f"{name!r} is not there")
        return self.content(name), SourceInfo(self.path, name, "0.tar", (name,))

    def get_path(self):
        return self.path

    def __reduce__(self):
        return _counting, (self.size, self.path)


def _counting(size, path):
    return CountingStore(size, path=path)
