"""In which form a cache keeps files: as their stores have them, or decoded."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from energon.cache.codec import decode, encode
from energon.samples.source_info import SourceInfo
from energon.sources.files.store import FileStore

CachedContent = tuple[bytes, SourceInfo]
"""What is kept of a file, and where it came from."""


class Form(Protocol):
    """In which form contents are kept."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return what to keep of a file, and where it came from."""

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value of a file of which `data` were kept."""


class RawForm:
    """Files are kept as they are, and decoded whenever they are wanted."""

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a file."""
        return _digest((store.identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the file, and where it came from."""
        return store.get_raw(name)

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return what the store makes of the file."""
        return store.decode(name, data)


class DecodedForm:
    """Files are decoded in the background, and their values kept: larger, and ready to use.

    A value that cannot be kept without pickle is kept as the file that it is decoded from.
    """

    def key(self, store: FileStore[Any], name: str) -> str:
        """Return the key of a value."""
        return _digest(("decoded", store.decoded_identity, store.full_name(name)))

    def fetch(self, store: FileStore[Any], name: str) -> CachedContent:
        """Return the value as bytes, and where its file came from."""
        raw, source = store.get_raw(name)
        try:
            return _VALUE + encode(store.decode(name, raw)), source
        except TypeError:
            return _FILE + raw, source

    def value(self, store: FileStore[Any], name: str, data: bytes) -> Any:
        """Return the value."""
        content = memoryview(data)[1:]
        if data[:1] == _VALUE:
            return decode(content)
        return store.decode(name, bytes(content))


_VALUE, _FILE = b"v", b"f"


def _digest(identity: Any) -> str:
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
