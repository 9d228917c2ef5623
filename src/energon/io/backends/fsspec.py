"""All other places, through fsspec: whatever it or a package that extends it can open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from energon.errors import (
    ConfigError,
    DatasetNotFoundError,
    MissingExtraError,
    StorageError,
)
from energon.extra import needs_extra
from energon.io.address import Address, redact
from energon.io.backends.base import ObjectInfo
from energon.io.backends.library_backend import LibraryBackend
from energon.io.backends.object_errors import cause_of

_VERSIONS = ("ETag", "etag", "md5Hash", "checksum", "oid")


def fsspec_backend(parts: Address) -> FsspecBackend:
    """Return what fsspec opens for a scheme.

    Raises:
        MissingExtraError: If fsspec, or what it needs for the scheme, is not installed.
        ConfigError: If it knows no such scheme.
    """
    with needs_extra("fsspec", f"{parts.scheme}:// needs the package fsspec"):
        import fsspec
    try:
        system, root = fsspec.core.url_to_fs(parts.root)
    except ValueError as error:
        raise ConfigError(
            f"no store for {parts.scheme}://, and fsspec knows none; check the spelling"
        ) from error
    except ImportError as error:
        raise MissingExtraError(f"{parts.scheme}://: {error}") from error
    except Exception as error:
        # Some connect at once. What they say may hold a password.
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
            found = self._system.info(self._path(key))
        if found["type"] == "directory":
            raise DatasetNotFoundError(f"{self.origin}/{key}: is a folder, expected a file")
        return _info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            self._system.invalidate_cache()
            found = self._system.find(self._path(prefix), detail=True)
        for path, about in found.items():
            yield _info(path.removeprefix(self._root).strip("/"), about)

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

    def _translate(self, error: Exception, place: str) -> StorageError:
        transient = isinstance(error, OSError)
        return StorageError(f"{place}: {cause_of(error)}", transient=transient)


def _info(key: str, found: Any) -> ObjectInfo:
    version = next((str(found[name]) for name in _VERSIONS if found.get(name)), None)
    written = found.get("mtime") or found.get("LastModified") or found.get("created") or 0
    seconds = written.timestamp() if hasattr(written, "timestamp") else float(written)
    if version is None and seconds:
        version = f"{found['size']}-{seconds}"
    return ObjectInfo(key, int(found["size"]), version, int(seconds * 1e9))
