"""Recognize what is at a path: a metadataset, or a dataset and its kind."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from functools import cached_property
from itertools import islice

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.formats.meta.split import SPLIT_WORDS, split_of_folders
from energon.io.address import address_name, is_remote, join_address, redact, split_address
from energon.io.files import is_file, open_store, read_document
from energon.messages import shell_word
from energon.metadataset.advice import (
    MAX_COMPARED_NAMES,
    explain_missing,
    files_below,
    names_in_folder,
    refuse_metadata,
)
from energon.metadataset.kind import (
    METADATA_TABLES,
    KindEntry,
    added_kinds,
    check_installed,
    known_kinds,
)


def dataset_kind(path: str | os.PathLike[str]) -> str:
    """Return the name of the kind of dataset at `path`, looking at as few files as possible.

    Raises:
        DatasetNotFoundError: If there is nothing that can be loaded.
        StorageError: If it is remote and cannot be reached.
    """
    path = os.fspath(path)
    if not path:
        raise DatasetNotFoundError("the path is empty; expected the address of a dataset")
    refuse_metadata(path)
    folder = _Folder(path)
    for entries in known_kinds():
        entry = _entry_of(folder, entries)
        if entry is not None:
            check_installed(entry, redact(path))
            return entry.name
    for entries in known_kinds():
        for entry in entries:
            if entry.media and _is_in_most(folder, entry.media):
                return entry.name
    raise DatasetNotFoundError(explain_missing(path))


def check_shard_list(path: str) -> None:
    """Check that a folder without listed shards is not a prepared dataset without its list.

    Raises:
        ConfigError: If it is one.
    """
    if is_file(join_address(path, f"{META}/split.yaml")):
        raise ConfigError(
            f"{redact(path)} was prepared, but its {META}/.info.json is missing; restore the file, "
            f"or run `energon prepare {shell_word(redact(path))}` again"
        )


def added_kind(path: str) -> KindEntry | None:
    """Return the kind of another package that a dataset is of; None if it is of none."""
    entry = _entry_of(_Folder(path), added_kinds())
    if entry is not None:
        check_installed(entry, redact(path))
    return entry


def _entry_of(folder: _Folder, entries: Sequence[KindEntry]) -> KindEntry | None:
    """Return the first kind that applies, by the name, then by metadata, then by the files."""
    path, name = folder.path, address_name(folder.path)
    for entry in entries:
        if name[1:].endswith(entry.suffixes) and is_file(path):
            return entry
        if entry.below and path.endswith(entry.below) and ("*" in path or "[" in path):
            return entry
    for entry in entries:
        for marker in entry.markers:
            if is_file(join_address(path, f".nv-meta/{marker}")):
                return entry
    for entry in entries:
        if any(_holds(folder, name, entry.says) for name in entry.holds):
            return entry
        if entry.pair and _has_pair(folder, entry.pair):
            return entry
        if entry.below and _are_most(folder, entry.below):
            return entry
    return None


class _Folder:
    """The files at an address. In an object store, one listing answers all questions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._keys: dict[str, Set[str]] = {}

    @cached_property
    def _listed(self) -> list[str] | None:
        """The first paths of files in an object store; None for other addresses."""
        if not is_remote(self.path):
            return None
        store, key = open_store(self.path)
        if not store.backend.can_list:
            return None
        cut = len(key) + 1 if key else 0
        return [info.key[cut:] for info in islice(store.backend.list(key), MAX_COMPARED_NAMES)]

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        listed = self._listed
        if listed is not None and len(listed) < MAX_COMPARED_NAMES:
            return name in listed
        return is_file(join_address(self.path, name))

    def keys(self, name: str) -> Set[str]:
        """Return the keys of the JSON object in a file, which is read once for all kinds."""
        if name not in self._keys:
            self._keys[name] = object_keys(join_address(self.path, name))
        return self._keys[name]

    def names(self) -> Sequence[str]:
        """Return some names directly in it; none if it cannot be listed."""
        listed = self._listed
        if listed is not None and len(listed) < MAX_COMPARED_NAMES:
            return [name.partition("/")[0] for name in listed]
        return names_in_folder(self.path)

    @cached_property
    def splits(self) -> list[str]:
        """The names of the folders in it that tell a split, see `splits_by_name`."""
        names = dict.fromkeys(self.names())
        # Web servers list nothing.
        return [name for name in names or SPLIT_WORDS if split_of_folders(f"{name}/")]

    @cached_property
    def compared(self) -> list[str]:
        """The first paths of files below it."""
        names = self._listed
        if names is None:
            is_far = is_remote(self.path)
            names = [] if is_far else list(islice(files_below(self.path), MAX_COMPARED_NAMES))
        hidden = (".", "_", "README")
        return [name for name in names if not name.rpartition("/")[2].startswith(hidden)]


def _holds(folder: _Folder, name: str, says: str | tuple[str, ...]) -> bool:
    """Return whether there is a file, and an object in it with a key; "" asks for no key."""
    if name.startswith("*/"):
        return any(_holds(folder, f"{split}{name[1:]}", says) for split in folder.splits)
    if not folder.has(name) or not says:
        return folder.has(name)
    keys = {says} if isinstance(says, str) else says
    return not folder.keys(name).isdisjoint(keys)


def object_keys(file: str) -> Set[str]:
    """Return the keys of the JSON object in a file; none if it holds anything else."""
    try:
        content = parse_json(read_document(file), origin=redact(file))
    except FormatError:
        return frozenset()
    return content.keys() if isinstance(content, dict) else frozenset()


def _has_pair(folder: _Folder, endings: tuple[str, ...]) -> bool:
    """Return whether a pair of files is at an address, or in the folder there."""
    # A server or bucket itself has no name that could be continued.
    has_name = not is_remote(folder.path) or split_address(folder.path).key
    if has_name and all(is_file(folder.path + ending) for ending in endings):
        return True
    names = set(folder.names())
    stems = (name.removesuffix(endings[0]) for name in names if name.endswith(endings[0]))
    return any(all(stem + ending in names for ending in endings[1:]) for stem in stems)


def _are_most(folder: _Folder, ending: str) -> bool:
    """Return whether most of the first files below a folder have a suffix."""
    names = folder.compared
    return 2 * sum(name.endswith(ending) for name in names) > len(names)


def _is_in_most(folder: _Folder, endings: tuple[str, ...]) -> bool:
    """Return whether most samples below a folder, by base name, have a file with such a suffix.

    Example:
        a/0.jpg, a/0.txt, b/1.jpg and classes.json are three, of which two have one.
    """
    samples: dict[str, bool] = {}
    for name in folder.compared:
        base, _, file = name.rpartition("/")
        if file in METADATA_TABLES:  # as many as there are folders, which may be small
            continue
        key = f"{base}/{file.partition('.')[0]}"
        samples[key] = samples.get(key, False) or name.lower().endswith(endings)
    return 2 * sum(samples.values()) > len(samples)
