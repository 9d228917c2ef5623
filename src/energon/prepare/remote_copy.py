"""A copy here of a JSONL file in a store, with its index and splits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from energon.errors import DatasetNotFoundError, EnergonError
from energon.formats.jsonl import jsonl_index_path, jsonl_split_path
from energon.io.address import address_name, join_address, parent_address, redact
from energon.io.files import file_info, read_bytes
from energon.io.registry import open_store


class JsonlCopy:
    """A local file that stands for a remote one; `opened` gives it.

    Args:
        address: The remote file.
        folder: Where to put the copy.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.path = folder / address_name(address)

    @classmethod
    @contextmanager
    def opened(cls, address: str, *, content: bool = True) -> Iterator[JsonlCopy]:
        """Give a copy of the file and its splits, which is deleted at the end.

        Args:
            address: The remote file.
            content: Whether to copy what is in it; if not, the copy has the size only.

        Raises:
            DatasetNotFoundError: If there is no such file.
            StorageError: If it cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="energon-jsonl-") as folder:
            copy = cls(address, Path(folder))
            store, key = open_store(address)
            info = file_info(address)
            if info is None:
                raise DatasetNotFoundError(f"{redact(address)}: there is no such file")
            with open(copy.path, "wb") as file:
                if content:
                    file.writelines(store.stream(key, version=info.version))
                else:
                    file.truncate(info.size)
            copy.fetch(copy.beside(copy.splits), copy.splits)
            try:
                yield copy
            except EnergonError as error:
                # Who reads the message knows the file by its address.
                raise type(error)(copy.said(str(error))) from error

    @property
    def splits(self) -> Path:
        """Where the splits are."""
        return Path(jsonl_split_path(self.path))

    @property
    def index(self) -> Path:
        """Where the index is, if `fetch_index` was called or it was made."""
        return Path(jsonl_index_path(self.path))

    def fetch_index(self) -> None:
        """Copy the index, if there is one."""
        self.fetch(self.beside(self.index), self.index)

    def beside(self, copy: Path) -> str:
        """Return the remote address of the file whose copy is or will be beside this one."""
        return join_address(parent_address(self.address), copy.name)

    def said(self, text: str) -> str:
        """Return a message about the copy as one about the address."""
        return text.replace(os.fspath(self.path), redact(self.address))

    @staticmethod
    def fetch(address: str, path: Path) -> None:
        """Copy a file beside the remote one, if it is there."""
        try:
            path.write_bytes(read_bytes(address))
        except DatasetNotFoundError:
            return
