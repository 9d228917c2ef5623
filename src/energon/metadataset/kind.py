"""Recognize what is at a path: a metadataset, or a dataset and its kind."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

from energon.errors import ConfigError, DatasetNotFoundError, FormatError
from energon.formats.json_text import parse_json
from energon.formats.meta.info import META
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    parent_address,
    redact,
    split_address,
)
from energon.io.files import describe_missing, is_file, open_store, read_document
from energon.messages import nearest, shell_word


class KindEntry(NamedTuple):
    """How to recognize one kind, and where it is implemented.

    Args:
        name: Its name in documents and reports.
        home: `module:attribute` of a `DatasetKind`, imported when a dataset of the kind is used;
            empty for metadatasets.
        suffixes: A file with one of these suffixes is of this kind.
        markers: A folder with one of these files in its `.nv-meta` is of this kind.
        has_samples: Whether it can be trained with; False for auxiliary data.
        pair: Suffixes of files that form a dataset together: a folder in which some name occurs
            with each of them is of this kind, as is an address they can be appended to.
        upkeep: `module:attribute` of an `energon.prepare.upkeep.Upkeep`, for kinds that are not
            folders of shards.
        holds: A folder that contains one of these files is of this kind.
        says: Requires this key, or one of several, in the JSON object in that file.
        below: A folder is of this kind if most files below it have this suffix; so is a pattern
            such as `data/*.parquet`.
        media: A folder of no other kind is of this kind if most groups of files below it that
            share a base name include one with such a suffix.
    """

    name: str
    home: str = ""
    suffixes: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    has_samples: bool = True
    pair: tuple[str, ...] = ()
    upkeep: str = ""
    below: str = ""
    holds: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    says: str | tuple[str, ...] = ""


_INDEXES = ("index.json", "train/index.json")
MEDIA = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac"),
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg"),
)
"""Suffixes of the files in a folder of media."""

ARROW_KEYS = ("_data_files", "splits")
"""Keys in the files of a saved Hugging Face dataset; other programs write files of these names."""

KINDS = (
    KindEntry("metadataset", suffixes=(".yaml", ".yml")),
    KindEntry(
        "jsonl",
        "energon.sources.tables.jsonl:KIND",
        suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst"),
        upkeep="energon.prepare.verify.jsonl:UPKEEP",
    ),
    KindEntry(
        "webdataset",
        "energon.sources.webdataset_kind:KIND",
        markers=(".info.json", ".info.yaml"),
    ),
    KindEntry(
        "filesystem",
        "energon.sources.files.open:KIND",
        markers=("index.sqlite",),
        has_samples=False,
    ),
    KindEntry(
        "tokens",
        "energon.sources.tokens.kind:KIND",
        suffixes=(".idx", ".bin"),
        pair=(".idx", ".bin"),
    ),
    KindEntry(
        "arrow",
        "energon.sources.tables.arrow:KIND",
        holds=("state.json", "dataset_dict.json"),
        says=ARROW_KEYS,
    ),
    KindEntry(
        "parquet", "energon.sources.tables.parquet:KIND", suffixes=(".parquet",), below=".parquet"
    ),
    KindEntry("mds", "energon.sources.chunks:MDS", holds=_INDEXES, says="shards"),
    KindEntry("litdata", "energon.sources.chunks:LITDATA", holds=_INDEXES, says="chunks"),
    KindEntry("folder", "energon.sources.media_folder:KIND", media=MEDIA),
)
"""The built-in kinds. The first that applies is taken."""

ENTRY_POINTS = "energon.dataset_kinds"
"""The group of entry points by which packages add a `KindEntry`."""

TABLES = (
    ".csv",
    ".tsv",
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
    ".jsonl.gz",
    ".csv.gz",
)
"""Suffixes of tables, whose rows may be samples."""

_READABLE = (
    "expected the folder of a prepared dataset of tar shards, a metadataset (.yaml, .yml), a "
    ".jsonl, .jsonl.gz or .jsonl.zst file, token files (.idx, .bin) or .parquet files"
)

CONVERTED = "@refs/convert/parquet"
"""The revision of a dataset in which the hub keeps Parquet copies of other files."""

MAX_COMPARED = 10_000
"""How many names in a folder are used to recognize it."""

MAX_SHOWN = 10
"""How many names of a folder a message lists."""

MAX_LEVELS = 3
"""How many folders above a path are looked at: in stores, each takes requests."""

_CUT_SCHEME = re.compile(r"([a-z][a-z0-9]+):/?([^/].*)")

META_DOCUMENTS = ("dataset.yaml", "split.yaml", ".info.yaml")
"""Documents of a prepared dataset that could be taken for metadatasets."""


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
    for entries in _known():
        name = address_name(path)
        for entry in entries:
            if name[1:].endswith(entry.suffixes) and is_file(path):
                return entry.name
            if entry.below and path.endswith(entry.below) and ("*" in path or "[" in path):
                return entry.name
        for entry in entries:
            for marker in entry.markers:
                if is_file(join_address(path, f".nv-meta/{marker}")):
                    return entry.name
        for entry in entries:
            if any(_holds(folder, name, entry.says) for name in entry.holds):
                return entry.name
            if entry.pair and _has_pair(folder, entry.pair):
                return entry.name
            if entry.below and _are_most(folder, entry.below):
                return entry.name
    for entries in _known():
        for entry in entries:
            if entry.media and _is_in_most(folder, entry.media):
                return entry.name
    raise DatasetNotFoundError(explain_missing(path))


class _Folder:
    """The files at an address. In an object store, one listing answers all questions."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _listed(self) -> list[str] | None:
        """The first paths of files in an object store; None for other addresses."""
        if not is_remote(self.path):
            return None
        store, key = open_store(self.path)
        if not store.backend.can_list:
            return None
        cut = len(key) + 1 if key else 0
        return [found.key[cut:] for found in islice(store.backend.list(key), MAX_COMPARED)]

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        listed = self._listed
        if listed is not None and len(listed) < MAX_COMPARED:
            return name in listed
        return is_file(join_address(self.path, name))

    def names(self) -> Sequence[str]:
        """Return some names directly in it; none if it cannot be listed."""
        listed = self._listed
        if listed is not None and len(listed) < MAX_COMPARED:
            return [name.partition("/")[0] for name in listed]
        return _names_in(self.path)

    @cached_property
    def compared(self) -> list[str]:
        """The first paths of files below it."""
        names = self._listed
        if names is None:
            is_far = is_remote(self.path)
            names = [] if is_far else list(islice(_files_below(self.path), MAX_COMPARED))
        hidden = (".", "_", "README")
        return [name for name in names if not name.rpartition("/")[2].startswith(hidden)]


def _holds(folder: _Folder, name: str, says: str | tuple[str, ...]) -> bool:
    """Return whether there is a file, and an object in it with a key; "" asks for no key."""
    if not folder.has(name) or not says:
        return folder.has(name)
    return has_key(join_address(folder.path, name), *([says] if isinstance(says, str) else says))


def has_key(file: str, *keys: str) -> bool:
    """Return whether a file holds a JSON object with one of some keys."""
    try:
        content = parse_json(read_document(file), origin=redact(file))
    except FormatError:
        return False
    return isinstance(content, dict) and any(key in content for key in keys)


def _has_pair(folder: _Folder, endings: tuple[str, ...]) -> bool:
    """Return whether a pair of files is at an address, or in the folder there."""
    if all(is_file(folder.path + ending) for ending in endings):
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
        key = f"{base}/{file.partition('.')[0]}"
        samples[key] = samples.get(key, False) or name.lower().endswith(endings)
    return 2 * sum(samples.values()) > len(samples)


def _names_in(folder: str) -> Sequence[str]:
    """Return some names directly in a folder; none if it cannot be listed."""
    if not is_remote(folder):
        try:
            return list(islice(os.listdir(folder), MAX_COMPARED))
        except OSError:
            return []
    store, key = open_store(folder)
    return store.names_in(key) if store.backend.can_list else []


def kind_entry(name: str) -> KindEntry:
    """Return the kind of this name.

    Raises:
        ConfigError: If there is none.
    """
    for entries in _known():
        for entry in entries:
            if entry.name == name:
                return entry
    known = ", ".join(entry.name for entry in (*KINDS, *_installed()))
    raise ConfigError(f"there is no kind of dataset {name!r}; there are {known}")


def _known() -> Iterator[Sequence[KindEntry]]:
    """Yield the built-in kinds and then those of other packages, whose entry points are read."""
    yield KINDS
    yield _installed()


def _installed() -> tuple[KindEntry, ...]:
    """Return the kinds of other packages. Called only if no built-in kind applies."""
    return _entries_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _entries_on(path: tuple[str, ...]) -> tuple[KindEntry, ...]:
    from importlib.metadata import entry_points

    return tuple(KindEntry(*point.load()) for point in entry_points(group=ENTRY_POINTS))


def explain_missing(path: str) -> str:
    """Return why there is no dataset at an address, and what to do or what is near it.

    Raises:
        DatasetNotFoundError: If not even the bucket exists.
        StorageError: If the store cannot be reached.
    """
    return _explain_remote(path) if is_remote(path) else _explain(path)


def _explain_remote(path: str) -> str:
    """Return why there is no dataset at an address.

    Raises:
        DatasetNotFoundError: If not even the bucket exists.
        StorageError: If the store cannot be reached.
    """
    shown = redact(path)
    is_document = any(path.endswith(entry.suffixes) for entry in KINDS if entry.suffixes)
    store, key = open_store(path)
    if not store.backend.can_list:
        missing = "does not exist" if is_document else "has no .nv-meta/.info.json"
        return f"{shown} {missing}; check the address, or run `energon prepare` and upload it again"
    if key and is_file(path):
        return f"{shown} {advice(path)}"
    if not store.has_any(key):
        return describe_missing(path)
    return f"{shown} {advice(path)}"


def refuse_metadata(path: str) -> None:
    """Raise DatasetNotFoundError if an address leads to metadata of a dataset instead of to it."""
    owner = _dataset_around(path)
    if owner is not None:
        raise DatasetNotFoundError(f"{redact(path)} {_belongs_to(owner)}")


def _dataset_around(path: str) -> str | None:
    """Return the dataset to whose metadata an address leads; None for any other address.

    Metadatasets with names of their own may lie anywhere, also there.
    """
    folder, name = path, ""
    if address_name(folder) != META:
        folder, name = parent_address(path), address_name(path)
    is_document = name.endswith((".yaml", ".yml")) and name not in META_DOCUMENTS
    if address_name(folder) != META or is_document:
        return None
    owner = parent_address(folder)
    return owner if _is_prepared(owner) else None


def _is_prepared(folder: str) -> bool:
    """Return whether a folder has metadata of a dataset."""
    markers = (marker for entry in KINDS for marker in entry.markers)
    return any(is_file(join_address(folder, f"{META}/{marker}")) for marker in markers)


def _dataset_above(path: str) -> str | None:
    """Return the prepared dataset that a file or folder belongs to, if one is near."""
    for _ in range(MAX_LEVELS):
        path, below = parent_address(path), path
        if path == below:
            return None
        if _is_prepared(path):
            return path
    return None


def _belongs_to(owner: str) -> str:
    return f"is metadata of a prepared dataset; name the dataset itself, {redact(owner)}"


def advice(path: str) -> str:
    """Return in words how to turn the files at an address into a dataset.

    Raises:
        StorageError: If it is remote and cannot be listed.
    """
    owner = _dataset_around(path)
    if owner is not None:
        return _belongs_to(owner)
    above = _dataset_above(path)
    if above is not None:
        return f"is part of a prepared dataset; name the dataset itself, {redact(above)}"
    shown = redact(path)
    pack = f"`energon pack {shell_word(shown)} {_target(path)}`"
    if is_file(path) and not _is_bucket(path):
        if path.lower().endswith(TABLES):
            return f"is a table; {pack} makes a sample of each row"
        if path.endswith(".tar"):
            folder = shown.rpartition("/")[0] or "."
            return (
                f"is a shard; `energon prepare {shell_word(folder)}` makes a dataset of its folder"
            )
        return f"is a file; {_READABLE}"
    if not is_remote(path) and not os.access(path, os.R_OK | os.X_OK):
        return "cannot be read by this user: permission denied"
    names = list(islice(_files_below(path), MAX_COMPARED))
    inside = datasets_in(path)
    of_datasets = tuple(f"{path.rstrip('/')}/{each}/" for each in inside)
    if inside and all(name.startswith(of_datasets) for name in names):
        return f"contains prepared datasets; name one of them: {', '.join(inside[:MAX_SHOWN])}"
    names = [name.lower() for name in names if not name.endswith(".jsonl.idx")]
    if not names:
        return (
            f"holds no files; put tar shards into it and run `energon prepare {shell_word(shown)}`"
        )
    if any(name.endswith(".tar") for name in names):
        return f"has no .nv-meta/.info.json; run `energon prepare {shell_word(shown)}`"
    if any(".tar." in name or name.endswith(".tgz") for name in names):
        return f"has compressed archives; {pack} makes shards of them"
    suffixes = Counter(os.path.splitext(name)[1] for name in names)
    kinds = ", ".join(suffix for suffix, _ in suffixes.most_common(3) if suffix)
    tables = sum(name.endswith(TABLES) for name in names)
    if path.startswith("hf://datasets/") and "@" not in path:
        root = split_address(path).root
        return f"has files ({kinds}); the hub may have Parquet copies of them: {root}{CONVERTED}"
    if tables and 2 * tables > len(names):
        return f"has tables ({kinds}); {pack} makes a sample of each row; {_READABLE}"
    if kinds:
        return f"has files ({kinds}) and no shards; {pack} makes a dataset of them"
    return f"has no .nv-meta/.info.json; {_READABLE}"


def _is_bucket(path: str) -> bool:
    return is_remote(path) and not split_address(path).key


def datasets_in(path: str) -> list[str]:
    """Return the names of the folders in a folder that are prepared datasets."""
    if is_remote(path):
        store, key = open_store(path)
        cut = len(key) + 1 if key else 0
        steps = (found.key[cut:].split("/") for found in store.first(key, MAX_COMPARED))
        return sorted({each[0] for each in steps if each[1:2] == [META]})
    return sorted(name for name in _names_in(path) if _is_prepared(join_address(path, name)))


def _target(path: str) -> str:
    """Return a target for packing the files at an address: beside it."""
    if not is_remote(path):
        return shell_word(f"{os.path.splitext(os.path.normpath(path))[0]}_packed")
    if not split_address(path).key:
        return "TARGET"  # the names beside a bucket belong to others
    return shell_word(f"{os.path.splitext(redact(path).rstrip('/'))[0]}_packed")


def _files_below(path: str) -> Iterator[str]:
    """Yield the paths of files below a folder, without those that begin with a dot."""
    if is_remote(path):
        store, key = open_store(path)
        found = store.first(key, MAX_COMPARED)
        root = split_address(path).root
        for each in found:
            if not address_name(each.key).startswith("."):
                yield f"{root}/{each.key}"
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")
        )


def _explain(path: str) -> str:
    if os.path.exists(path):
        return f"{path} {advice(path)}"
    parent, name = os.path.split(os.path.normpath(path))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    parent = parent or "."
    proposal = _proposal(name, parent)
    if name.startswith("~"):
        proposal = "; write the whole path, only shells replace ~ by a home directory"
    if cut := _CUT_SCHEME.match(path):
        proposal = f"; addresses of stores have two slashes: {cut[1]}://{cut[2]}"
    return f"{path} does not exist: no {name!r} in {parent}{proposal}"


def _proposal(name: str, folder: str) -> str:
    try:
        close = nearest(name, os.listdir(folder), cutoff=0.75)
    except OSError:
        return ""
    return f", did you mean {close!r}?" if close else ""
