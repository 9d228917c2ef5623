"""A file of a store, to read parts of."""

from __future__ import annotations

import io
from typing import IO, Any, Protocol

from energon.io.range_file import LOCAL_BUFFER_BYTES, REMOTE_BUFFER_BYTES


class OpensFiles(Protocol):
    """A store that opens files by name."""

    def open(self, name: str) -> IO[bytes]:
        """Return a file."""


class StoreFile(io.BufferedReader):
    """A file to read parts of. Copies that were pickled open it anew, at its beginning.

    Args:
        file: The file, open; it is taken over.
        store: Opens it again elsewhere.
        name: As which the store knows it.
        is_remote: Whether much is to be fetched at a time.
    """

    def __init__(
        self, file: io.BufferedReader, store: OpensFiles, name: str, *, is_remote: bool
    ) -> None:
        super().__init__(file.detach(), REMOTE_BUFFER_BYTES if is_remote else LOCAL_BUFFER_BYTES)
        self._store = store
        self._name = name

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _open, (self._store, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r} of {self._store!r})"


def _open(store: OpensFiles, name: str) -> IO[bytes]:
    return store.open(name)
