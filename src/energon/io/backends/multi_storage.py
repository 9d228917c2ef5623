"""Profiles that only multi-storage-client itself can open.

Ranges are read as ranges: its file objects would fetch whole objects for the first byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from energon.errors import (
    DatasetNotFoundError,
    StorageError,
)
from energon.extra import needs_extra
from energon.io.backends.base import ObjectInfo
from energon.io.backends.library_backend import LibraryBackend
from energon.io.backends.object_errors import cause_of

_STATUS = re.compile(r"status_code: (\d{3})")
_KIND = re.compile(r"error[_ ]type: (\w+)")
_TRANSIENT = (
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "IncompleteReadError",
    "ReadTimeoutError",
)


class MscBackend(LibraryBackend):
    """The objects of a profile.

    Args:
        origin: The root for messages.
        profile: Name of the profile.

    Raises:
        MissingExtraError: If multi-storage-client is not installed.
    """

    def __init__(self, origin: str, profile: str) -> None:
        with needs_extra("msc", f"{origin}: this kind of profile needs multi-storage-client"):
            from multistorageclient import StorageClient, StorageClientConfig
        self.origin = origin
        self._client: Any = StorageClient(StorageClientConfig.from_file(profile=profile))

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            found = self._client.info(key)
        if found.type == "directory":
            raise DatasetNotFoundError(f"{self.origin}/{key}: is a folder, expected a file")
        return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for found in self._client.list(path=f"{prefix}/" if prefix else ""):
                yield _info(found.key.lstrip("/"), found)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        with self._errors(key):
            if isinstance(content, bytes):
                self._client.write(key, content)
            else:
                self._client.upload_file(key, os.fspath(content))

    def _range(self, key: str, start: int, stop: int) -> bytes:
        from multistorageclient.types import Range

        try:
            with self._errors(key):
                return bytes(self._client.read(key, byte_range=Range(start, stop - start)))
        except _BehindEnd:
            return b""

    def _delete(self, key: str) -> None:
        self._client.delete(key)

    def _translate(self, error: Exception, place: str) -> StorageError:
        return _translate(error, place)


class _BehindEnd(StorageError):
    """A range was asked for that begins where the object has ended."""


def _translate(error: Exception, place: str) -> StorageError:
    """Return our error, with the status and the kind of failure that the client names."""
    text = str(error)
    status, kind = _STATUS.search(text), _KIND.search(text)
    if status is not None and status[1] == "416":
        return _BehindEnd(f"{place}: ends before the range that was asked for")
    cause = f"the server answered {status[1]}" if status else kind[1] if kind else ""
    transient = type(error).__name__ == "RetryableError" or (
        status[1].startswith("5") if status else cause in _TRANSIENT
    )
    reason = cause_of(error)
    said = reason + (f", {cause}" if cause else "")
    return StorageError(f"{place}: {said}; see the profile in MSC_CONFIG", transient=transient)


def _info(key: str, found: Any) -> ObjectInfo:
    written = found.last_modified
    mtime_ns = int(written.timestamp() * 1e9) if written is not None else 0
    version = found.etag or (f"{found.content_length}-{mtime_ns}" if mtime_ns else None)
    return ObjectInfo(key, found.content_length, version, mtime_ns)
