"""Backends over a library: fsspec and multi-storage-client.

fsspec opens everything that no other backend does; multi-storage-client opens profiles. Both read
their own configuration. Ranges are requested as ranges: file objects would fetch whole objects for
the first byte.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    EnergonError,
    MissingExtraError,
    StorageAccessError,
    StorageError,
    needs_extra,
)
from energon.io.address import Address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.object_backend import UNREACHABLE, cause_of, changed

UPLOAD_CHUNK_BYTES = 8 << 20


class LibraryBackend(ABC):
    """A backend over a library. Subclasses make its calls and translate its errors."""

    can_range = True
    can_list = True
    may_hang = True
    """Whether requests ignore time limits, so that the store has to watch them."""
    origin: str
    """The root for messages."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return size, version and time of an object."""

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        if stop <= start:
            return b""
        data = self._range(key, start, stop)
        # Asked afterwards: what was read before the object was replaced is of the old version.
        if version is not None and self.head(key).version != version:
            raise changed(f"{self.origin}/{key}")
        return data

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        size = self.head(key).size
        while start < size:
            yield self.get(key, start, min(size, start + UPLOAD_CHUNK_BYTES), version)
            start += UPLOAD_CHUNK_BYTES

    def delete(self, key: str) -> None:
        try:
            with self._errors(key):
                self._delete(key)
        except DatasetNotFoundError:
            return

    @abstractmethod
    def _range(self, key: str, start: int, stop: int) -> bytes:
        """Read a range that is not empty."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an object."""

    @abstractmethod
    def _translate(self, error: Exception, address: str) -> StorageError:
        """Return our error for one of the library's, whose messages may contain secrets."""

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Translate the library's errors."""
        address = f"{self.origin}/{key}"
        try:
            yield
        except FileNotFoundError:
            raise DatasetNotFoundError(f"{address}: there is no such object") from None
        except PermissionError:
            raise StorageAccessError(f"{address}: access denied; check the credentials") from None
        except EnergonError:
            raise
        except Exception as error:
            raise self._translate(error, address) from None


_VERSIONS = ("ETag", "etag", "md5Hash", "checksum", "oid")


def fsspec_backend(parts: Address) -> FsspecBackend:
    """Return the file system that fsspec opens for a scheme.

    Raises:
        MissingExtraError: If fsspec, or what it needs for the scheme, is not installed.
        ConfigError: If fsspec does not know the scheme.
    """
    with needs_extra("fsspec", f"{parts.scheme}:// needs the package fsspec"):
        import fsspec
    try:
        system, root = fsspec.core.url_to_fs(parts.root)
    except ValueError as error:
        raise ConfigError(
            f"neither energon nor fsspec knows {parts.scheme}://; check the spelling"
        ) from error
    except ImportError as error:
        raise MissingExtraError(
            f"fsspec needs another package for {parts.scheme}://: {error}"
        ) from error
    except Exception as error:
        # Some connect at once, and their messages may contain a password.
        raise StorageError(
            f"{redact(parts.root)}: {cause_of(error)}; check host name and credentials, which "
            f"fsspec's package for {parts.scheme}:// takes from its own configuration"
        ) from None
    return FsspecBackend(redact(parts.root), system, root)


class FsspecBackend(LibraryBackend):
    """A file system of fsspec.

    Args:
        origin: The root for messages.
        system: The file system.
        root: What keys are appended to.
    """

    def __init__(self, origin: str, system: Any, root: str) -> None:
        self.origin = origin
        self._system = system
        self._root = root.rstrip("/")

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            self._system.invalidate_cache()
            details = self._system.info(self._path(key))
        if details["type"] == "directory":
            raise DatasetNotFoundError(f"{self.origin}/{key}: is a folder, expected a file")
        return _fsspec_info(key, details)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            self._system.invalidate_cache()
            files = self._system.find(self._path(prefix), detail=True)
        for path, details in files.items():
            yield _fsspec_info(path.removeprefix(self._root).strip("/"), details)

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        path = self._path(key)
        with self._errors(key):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, bytes):
                self._system.pipe_file(path, content)
            else:
                self._system.put_file(os.fspath(content), path)

    def _range(self, key: str, start: int, stop: int) -> bytes:
        with self._errors(key):
            return bytes(self._system.cat_file(self._path(key), start=start, end=stop))

    def _delete(self, key: str) -> None:
        self._system.rm_file(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _translate(self, error: Exception, address: str) -> StorageError:
        transient = isinstance(error, OSError)
        cause = cause_of(error)
        return StorageError(
            f"{address}: {cause}", transient=transient, unreachable=cause in UNREACHABLE
        )


def _fsspec_info(key: str, details: Any) -> ObjectInfo:
    version = next((str(details[name]) for name in _VERSIONS if details.get(name)), None)
    written = details.get("mtime") or details.get("LastModified") or details.get("created") or 0
    seconds = written.timestamp() if hasattr(written, "timestamp") else float(written)
    if version is None and seconds:
        version = f"{details['size']}-{seconds}"
    return ObjectInfo(key, int(details["size"]), version, int(seconds * 1e9))


_STATUS = re.compile(r"status_code: (\d{3})")
_KIND = re.compile(r"error[_ ]type: (\w+)")
_TRANSIENT = (
    "ConnectionClosedError",
    "ConnectTimeoutError",
    "EndpointConnectionError",
    "IncompleteReadError",
    "ReadTimeoutError",
)


def msc_backend(parts: Address) -> MscBackend:
    """Return the objects of a profile, `msc://PROFILE`; `rclone://PROFILE` is its older name.

    Raises:
        MissingExtraError: If multi-storage-client is not installed.
        ConfigError: If it cannot open the profile.
    """
    with needs_extra("msc", f"{parts.root}: profiles need multi-storage-client"):
        from multistorageclient import StorageClient, StorageClientConfig
    name = parts.root.partition("://")[2]
    try:
        client = StorageClient(StorageClientConfig.from_file(profile=name))
    except Exception as error:
        # Its messages may quote the configuration, with keys in it.
        raise ConfigError(
            f"{parts.root}: multi-storage-client cannot open profile {name!r} "
            f"({type(error).__name__}); `msc config validate` checks its configuration. The first "
            "part of the address names a profile, not a bucket; MSC_CONFIG names the file of "
            "profiles"
        ) from None
    return MscBackend(parts.root, client)


class MscBackend(LibraryBackend):
    """The objects of a profile.

    Args:
        origin: The root for messages.
        client: The client of multi-storage-client for the profile.
    """

    def __init__(self, origin: str, client: Any) -> None:
        self.origin = origin
        self._client = client

    def head(self, key: str) -> ObjectInfo:
        with self._errors(key):
            metadata = self._client.info(key)
        if metadata.type == "directory":
            raise DatasetNotFoundError(f"{self.origin}/{key}: is a folder, expected a file")
        return _profile_info(key, metadata)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for metadata in self._client.list(path=f"{prefix}/" if prefix else ""):
                yield _profile_info(metadata.key.lstrip("/"), metadata)

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

    def _translate(self, error: Exception, address: str) -> StorageError:
        text = str(error)
        status, kind = _STATUS.search(text), _KIND.search(text)
        if status is not None and status[1] == "416":
            return _BehindEnd(f"{address}: ends before the requested range")
        cause = f"the server answered {status[1]}" if status else kind[1] if kind else ""
        transient = type(error).__name__ == "RetryableError" or (
            status[1].startswith("5") if status else cause in _TRANSIENT
        )
        reason = ", ".join(filter(None, (cause_of(error), cause)))
        message = f"{address}: {reason}; see the profile in MSC_CONFIG"
        return StorageError(message, transient=transient)


class _BehindEnd(StorageError):
    """A requested range begins at or after the end of the object."""


def _profile_info(key: str, metadata: Any) -> ObjectInfo:
    written = metadata.last_modified
    mtime_ns = int(written.timestamp() * 1e9) if written is not None else 0
    version = metadata.etag or (f"{metadata.content_length}-{mtime_ns}" if mtime_ns else None)
    return ObjectInfo(key, metadata.content_length, version, mtime_ns)
