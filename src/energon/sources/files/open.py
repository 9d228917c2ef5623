"""Open auxiliary data by its address in a metadataset."""

from __future__ import annotations

import os
from collections.abc import Mapping

from energon.errors import ConfigError
from energon.metadataset.document import Problems
from energon.metadataset.kind import dataset_kind
from energon.sources.files.folder import SystemFileStore
from energon.sources.files.store import FileStore
from energon.sources.kinds import kind_named
from energon.sources.shards import ShardPool

FOLDER_SCHEME = "filesystem://"
REMOTE_FOLDER_SCHEME = "filesystem+"
"""Goes before a URL: `filesystem+s3://bucket/images`."""


def open_file_store(
    address: str | os.PathLike[str], *, pool: ShardPool | None = None
) -> FileStore[bytes]:
    """Return the files at an address.

    Args:
        address: Folder of a prepared dataset, here or in an object store; `filesystem://` and any
            folder, or `filesystem+` and the URL of one.
        pool: Where shards are opened; None makes one for this store.

    Raises:
        DatasetNotFoundError: If there is nothing at the address.
        ConfigError: If what is there has no files that can be read by name.
    """
    address = os.fspath(address)
    folder = folder_of(address)
    if folder is not None:
        return SystemFileStore(folder)
    kind = dataset_kind(address)
    if kind == "metadataset":
        raise ConfigError(
            f"{address}: a {kind} has no files that can be read by name; expected a prepared "
            f"dataset, or a folder as {FOLDER_SCHEME}FOLDER"
        )
    return kind_named(kind, address).file_store(address, pool=pool)


def folder_of(address: str) -> str | None:
    """Return the folder that an address of auxiliary data stands for; None if for a dataset."""
    for prefix in (FOLDER_SCHEME, REMOTE_FOLDER_SCHEME):
        if address.startswith(prefix):
            return address.removeprefix(prefix)
    return None


def open_aux(
    aux: Mapping[str, str], *, origin: str, pool: ShardPool | None = None
) -> dict[str, FileStore[bytes]]:
    """Return the stores of a leaf by the names that cookers know them by.

    Raises:
        EnergonError: As `open_file_store`, for all of them that cannot be opened, with the place in
            the metadataset.
    """
    stores: dict[str, FileStore[bytes]] = {}
    problems = Problems()
    for name, address in aux.items():
        with problems.kept(f"{origin}: aux {name!r}"):
            stores[name] = open_file_store(address, pool=pool)
    problems.raise_all()
    return stores
