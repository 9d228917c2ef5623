"""Files on this machine, as a backend among others. The hot path reads through `local.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from energon.errors import (
    DatasetNotFoundError,
    ObjectChangedError,
    StorageAccessError,
    StorageError,
)
from energon.io.atomic import atomic_path
from energon.io.backends.base import ObjectInfo

CHUNK_BYTES = 1 << 20


class LocalBackend:
    """Files below a folder.

    Args:
        folder: What keys are relative to.
    """

    can_range = True
    can_list = True

    def __init__(self, folder: str = "/") -> None:
        self.origin = self._folder = folder

    def get(self, key: str, start: int, stop: int, version: str | None) -> bytes:
        with self._errors(key), open(self._path(key), "rb") as file:
            self._check(file.fileno(), key, version)
            return os.pread(file.fileno(), max(0, stop - start), start)

    def stream(self, key: str, start: int, version: str | None) -> Iterator[bytes]:
        with self._errors(key), open(self._path(key), "rb") as file:
            self._check(file.fileno(), key, version)
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._errors(key):
            if os.path.isdir(path):
                raise IsADirectoryError
            return _info(key, os.stat(path))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        top = self._path(prefix)
        for folder, _, names in os.walk(top, followlinks=True):
            for name in names:
                path = os.path.join(folder, name)
                key = os.path.join(prefix, os.path.relpath(path, top))
                with self._errors(key):
                    yield _info(key, os.stat(path))

    def put(self, key: str, content: bytes | os.PathLike[str]) -> None:
        path = self._path(key)
        with self._errors(key):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with atomic_path(path) as temporary:
                if isinstance(content, bytes):
                    temporary.write_bytes(content)
                else:
                    shutil.copyfile(content, temporary)

    def delete(self, key: str) -> None:
        with self._errors(key):
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                return

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key)

    def _check(self, descriptor: int, key: str, version: str | None) -> None:
        found = _info(key, os.fstat(descriptor)).version
        if version is not None and version != found:
            raise ObjectChangedError(
                f"{self._path(key)}: was rewritten since it was opened; run again"
            )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        path = self._path(key)
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DatasetNotFoundError(f"{path}: no such file") from error
        except IsADirectoryError as error:
            raise DatasetNotFoundError(f"{path}: is a folder, expected a file") from error
        except StorageError:
            raise
        except PermissionError as error:
            raise StorageAccessError(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}") from error


def _info(key: str, about: os.stat_result) -> ObjectInfo:
    version = f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"
    return ObjectInfo(key, about.st_size, version, about.st_mtime_ns)
