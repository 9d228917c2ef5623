"""What backends have in common that ask a library for ranges, which raises builtin errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from energon.errors import (
    DatasetNotFoundError,
    EnergonError,
    StorageAccessError,
    StorageError,
)
from energon.io.backends.base import ObjectInfo
from energon.io.backends.object_errors import changed

CHUNK_BYTES = 8 << 20


class LibraryBackend(ABC):
    """Backends over a library. Subclasses say how it is asked, and what its errors mean."""

    can_range = True
    can_list = True
    may_hang = True
    """Whether requests know nothing of time limits, so that somebody has to watch them."""
    origin: str
    """The root for messages."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Return what there is to say of an object."""

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
            yield self.get(key, start, min(size, start + CHUNK_BYTES), version)
            start += CHUNK_BYTES

    def delete(self, key: str) -> None:
        try:
            with self._errors(key):
                self._delete(key)
        except DatasetNotFoundError:
            return

    @abstractmethod
    def _range(self, key: str, start: int, stop: int) -> bytes:
        """Ask for a range that is not empty."""

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Ask that an object be deleted."""

    @abstractmethod
    def _translate(self, error: Exception, place: str) -> StorageError:
        """Return our error for one of the library's, whose messages may hold secrets."""

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Say in our words what went wrong."""
        place = f"{self.origin}/{key}"
        try:
            yield
        except FileNotFoundError:
            raise DatasetNotFoundError(f"{place}: there is no such object") from None
        except PermissionError:
            raise StorageAccessError(f"{place}: access denied; check the credentials") from None
        except EnergonError:
            raise
        except Exception as error:
            raise self._translate(error, place) from None
