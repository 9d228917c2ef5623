"""What lies at an address as a tree: a dataset, or a metadataset with all it names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property

from energon.io.address import address_name, is_remote, local_path
from energon.io.epath import EPath, any_path
from energon.metadataset.document import read_metadataset
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import Leaf
from energon.metadataset.resolve import resolve
from energon.sources.browse.files import LocalFolder, RemoteFolder
from energon.sources.browse.names import escape_name
from energon.sources.browse.tree import BrowsedFile, BrowsedFolder, NamedFolders, TreeEntry
from energon.sources.files.open import folder_of
from energon.sources.kinds import kind_named
from energon.sources.shards import ShardPool


class TreeOpener:
    """Makes trees of datasets, and of each dataset only one.

    Args:
        sample_folders: Whether each sample is a folder.
    """

    def __init__(self, *, sample_folders: bool = False) -> None:
        self.sample_folders = sample_folders
        self._pool = ShardPool()
        self._known: dict[str, BrowsedFolder] = {}

    def open(self, address: str | os.PathLike[str]) -> BrowsedFolder:
        """Return the tree of what lies at an address.

        A metadataset is a folder for each split, in which its datasets are folders, and beside
        each, as `DATASET.aux`, a folder of its auxiliary data.

        Raises:
            DatasetNotFoundError: If there is nothing.
            ConfigError: If a document makes no sense.
        """
        address = _absolute(os.fspath(address))
        if address not in self._known:
            self._known[address] = self._open(address)
        return self._known[address]

    def _open(self, address: str) -> BrowsedFolder:
        folder = folder_of(address)
        if folder is not None:
            path = any_path(folder)
            return RemoteFolder(path) if isinstance(path, EPath) else LocalFolder(path)
        kind = dataset_kind(address)
        if kind == "metadataset":
            return self._document(address)
        return kind_named(kind).browse(address, pool=self._pool, sample_folders=self.sample_folders)

    def _document(self, address: str) -> BrowsedFolder:
        splits = {}
        for name in read_metadataset(address).content.splits:
            leaves = resolve(address, split_part=name, training=False).leaves
            datasets = [each for leaf in leaves for each, _ in leaf.datasets]
            splits[escape_name(name)] = self._datasets(datasets)
        return NamedFolders(splits)

    def _datasets(self, leaves: Sequence[Leaf]) -> BrowsedFolder:
        folders: dict[str, BrowsedFolder] = {}
        paths: dict[str, str] = {}
        for leaf in leaves:
            name = first = escape_name(address_name(leaf.path))
            number = 1
            while paths.setdefault(name, leaf.path) != leaf.path:
                number += 1
                name = f"{first}#{number}"
            folders[name] = LazyFolder(self, leaf.path)
            if leaf.aux:
                folders[f"{name}.aux"] = NamedFolders(
                    {key: LazyFolder(self, place) for key, place in leaf.aux.items()}
                )
        return NamedFolders(folders)


def _absolute(address: str) -> str:
    """Return an address that stays valid when the process changes its folder, as libfuse does."""
    folder = folder_of(address)
    if folder is not None:
        return address.removesuffix(folder) + _absolute(folder)
    return address if is_remote(address) else os.path.abspath(local_path(address))


class LazyFolder:
    """A tree that is opened when somebody looks."""

    def __init__(self, opener: TreeOpener, address: str) -> None:
        self._opener = opener
        self._address = address

    @cached_property
    def _folder(self) -> BrowsedFolder:
        return self._opener.open(self._address)

    def entries(self) -> Iterator[TreeEntry]:
        """Yield what it holds."""
        return self._folder.entries()

    def find(self, name: str) -> BrowsedFolder | BrowsedFile | None:
        """Return what has this name, or None."""
        return self._folder.find(name)
