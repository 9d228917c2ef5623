"""Whole files at an address, wherever that is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from energon.errors import DatasetNotFoundError
from energon.io.address import is_remote, local_path, redact
from energon.io.backends.base import ObjectInfo
from energon.io.registry import open_store
from energon.limits import DOCUMENT_BYTES, check_document
from energon.utf8 import decode_utf8

LocalPath = str | os.PathLike[str]


def read_bytes(address: LocalPath) -> bytes:
    """Return a whole file.

    Raises:
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        StorageError: If it cannot be read.
    """
    store, key = open_store(address)
    return store.read(key)


def read_document(address: LocalPath) -> bytes:
    """Return a whole file that is a YAML or JSON document; no more is read than it may have.

    Raises:
        FormatError: If it has more than `DOCUMENT_BYTES`.
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        StorageError: If it cannot be read.
    """
    store, key = open_store(address)
    most = DOCUMENT_BYTES.value
    content = store.read(key, most=most)
    check_document(len(content), redact(os.fspath(address)))
    return content


def read_text(address: LocalPath) -> str:
    """Return a whole file of UTF-8.

    Raises:
        DatasetNotFoundError: If there is none (also a FileNotFoundError).
        FormatError: If it is of another encoding.
        StorageError: If it cannot be read.
    """
    return decode_utf8(read_bytes(address), origin=redact(os.fspath(address)))


def write_bytes(address: LocalPath, content: bytes | os.PathLike[str]) -> None:
    """Write a file: afterwards all of it is there, and until then the old one or none.

    Args:
        address: Where to.
        content: Bytes, or the path of a local file to copy.
    """
    store, key = open_store(address)
    store.write(key, content)


def write_text(address: LocalPath, content: str) -> None:
    """Write a file of UTF-8, see `write_bytes`."""
    write_bytes(address, content.encode())


def file_info(address: LocalPath) -> ObjectInfo | None:
    """Return size and version of a file, or None if there is none."""
    store, key = open_store(address)
    try:
        return store.info(key)
    except DatasetNotFoundError:
        return None


def file_size(address: LocalPath) -> int:
    """Return how many bytes a file has.

    Raises:
        DatasetNotFoundError: If there is none.
    """
    store, key = open_store(address)
    return store.info(key).size


def file_sizes(addresses: Sequence[LocalPath]) -> list[int]:
    """Return how many bytes each of some files has, asked for at the same time.

    Raises:
        DatasetNotFoundError: If one is missing.
    """
    if not any(is_remote(address) for address in addresses):
        return [file_size(address) for address in addresses]
    store, _ = open_store(addresses[0])
    return store.together(file_size, [(address,) for address in addresses])


def is_file(address: LocalPath) -> bool:
    """Return whether there is a file."""
    if not is_remote(address):
        return os.path.isfile(local_path(address))
    return file_info(address) is not None


def list_files(address: LocalPath) -> list[ObjectInfo]:
    """Return all files below a folder, sorted; keys are relative to it. Nothing if there is none.

    Raises:
        StorageError: If the place cannot say what it has, as web servers cannot.
    """
    store, key = open_store(address)
    cut = len(key) + 1 if key else 0
    return [found._replace(key=found.key[cut:]) for found in store.list(key)]


def has_files(address: LocalPath) -> bool:
    """Return whether there is a file in a folder, or below it."""
    store, key = open_store(address)
    return store.has_any(key)


def delete_file(address: LocalPath) -> None:
    """Delete a file, if it exists."""
    store, key = open_store(address)
    store.delete(key)
