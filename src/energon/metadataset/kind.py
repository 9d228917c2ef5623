"""Kinds of datasets: the table of them, and the kind of dataset, or the metadataset, at a path.

Where there is neither, explain why, and what to do with the files. Names of tables, whose rows can
become samples, are listed here as well.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from energon.errors import ConfigError, DatasetNotFoundError, FormatError, MissingExtraError
from energon.formats.meta.info import META, PACK_RECORD, SPLIT_WORDS, split_of_folders
from energon.formats.text import parse_json
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    parent_address,
    redact,
    split_address,
)
from energon.io.backends.local import walk_files
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
        upkeep: `module:attribute` of an `energon.prepare.verify.verify.Upkeep`, for kinds that are
            not folders of shards.
        holds: A folder that contains one of these files is of this kind; `*/` stands for a folder
            whose name tells a split.
        says: Requires this key, or one of several, in the JSON object in that file.
        below: A folder is of this kind if most files below it have this suffix; so is a pattern
            such as `data/*.parquet`.
        media: A folder of no other kind is of this kind if most groups of files below it that
            share a base name include one with such a suffix.
        expected: What messages say can be read: "a metadataset (.yaml, .yml)".
        beside: Suffixes of files beside datasets of this kind that belong to them.
        in_shards: Whether it is a folder of tar shards, which commands maintain without `upkeep`.
        rows: `module:attribute` of a function from an address to an `energon.prepare.importers.row.
            DatasetRows`, for kinds that `energon pack` turns into shards.
        package: The distribution that implements it, if it is not installed.
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
    expected: str = ""
    beside: tuple[str, ...] = ()
    in_shards: bool = False
    rows: str = ""
    package: str = ""


MEDIA = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".aifc"),
    *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg"),
)
"""Suffixes of the files in a folder of media."""

ARROW_KEYS = ("_data_files", "splits")
"""Keys in the files of a saved Hugging Face dataset; other programs write files of these names."""

KINDS = (
    KindEntry("metadataset", suffixes=(".yaml", ".yml"), expected="a metadataset (.yaml, .yml)"),
    KindEntry(
        "jsonl",
        "energon.sources.tables.jsonl:KIND",
        suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst"),
        upkeep="energon.prepare.jsonl:UPKEEP",
        expected="a .jsonl, .jsonl.gz or .jsonl.zst file",
        beside=(".jsonl.idx",),
    ),
    KindEntry(
        "webdataset",
        "energon.sources.webdataset_kind:KIND",
        markers=(".info.json", ".info.yaml"),
        expected="the folder of a prepared dataset of tar shards",
        in_shards=True,
    ),
    KindEntry(
        "filesystem",
        "energon.sources.files.open:KIND",
        markers=("index.sqlite",),
        has_samples=False,
    ),
    KindEntry(
        "tokens",
        "energon.sources.tables.token_files:KIND",
        suffixes=(".idx", ".bin"),
        pair=(".idx", ".bin"),
        expected="token files (.idx, .bin)",
    ),
    KindEntry(
        "arrow",
        "energon.sources.tables.arrow:KIND",
        holds=("state.json", "dataset_dict.json"),
        says=ARROW_KEYS,
    ),
    KindEntry(
        "parquet",
        "energon.sources.tables.parquet:KIND",
        suffixes=(".parquet",),
        below=".parquet",
        expected=".parquet files",
    ),
    KindEntry("folder", "energon.sources.media_folder:KIND", media=MEDIA),
)
"""The built-in kinds. The first that applies is taken."""

_INDEXES = ("index.json", "*/index.json")
PACKAGED = (
    KindEntry("mds", holds=_INDEXES, says="shards", package="energon-mds"),
    KindEntry("litdata", holds=_INDEXES, says="chunks", package="energon-mds"),
)
"""Kinds that distributions of this repository add. Without these, errors name the package."""

LINES = (".jsonl", ".ndjson")
"""Suffixes of tables with a JSON object in each line."""
TABLES = (".csv", ".tsv", ".json", *LINES, ".parquet")
"""Suffixes of tables, whose rows may be samples."""
METADATA_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""Names of tables that describe the files in a folder of media."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""


def table_suffix(name: str) -> str | None:
    """Return the suffix that tells what kind of table a file is; None if it is not a table.

    Example:
        >>> table_suffix("a/B.JSONL.gz"), table_suffix("a.tar.gz")
        ('.jsonl', None)
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
    return suffix if suffix in TABLES else None


def name_of_lines(name: str) -> str | None:
    """Return the name that a compressed file of JSON lines needs; None for files of other names.

    Example:
        >>> name_of_lines("a.json.gz"), name_of_lines("a.json")
        ('a.jsonl.gz', None)
    """
    stem, json, packing = name.rpartition(".json.")
    return f"{stem}{LINES[0]}.{packing}" if json and packing in ("gz", "zst") else None


ENTRY_POINTS = "energon.dataset_kinds"
"""The group of entry points by which packages add a `KindEntry`."""


def kind_entry(name: str) -> KindEntry:
    """Return the kind of this name.

    Raises:
        ConfigError: If there is none.
    """
    for entry in all_kinds():
        if entry.name == name:
            check_installed(entry)
            return entry
    names = ", ".join(entry.name for entry in all_kinds())
    raise ConfigError(f"there is no kind of dataset {name!r}; there are {names}")


def check_installed(entry: KindEntry, address: str = "a dataset") -> None:
    """Raise MissingExtraError if the package that implements a kind is not installed."""
    if entry.package:
        extra = entry.package.removeprefix("energon-")
        raise MissingExtraError(
            f"{address}: is of the kind {entry.name!r}, which the package {entry.package} reads; "
            f"install it with `pip install 'energon-loader[{extra}]'`, or from a checkout of "
            f"energon with `pip install ./plugins/{entry.package}`"
        )


def load_attribute(home: str) -> Any:
    """Return the object that `module:attribute` of a `KindEntry` names."""
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


def all_kinds() -> Iterator[KindEntry]:
    """Yield the built-in kinds and then those of other packages, whose entry points are read."""
    yield from KINDS
    yield from added_kinds()


def added_kinds() -> tuple[KindEntry, ...]:
    """Return the kinds of other packages, installed or not."""
    return _entries_on(tuple(sys.path))


@lru_cache(maxsize=4)
def _entries_on(path: tuple[str, ...]) -> tuple[KindEntry, ...]:
    from importlib.metadata import entry_points

    installed = [KindEntry(*point.load()) for point in entry_points(group=ENTRY_POINTS)]
    names = {entry.name for entry in installed}
    return (*installed, *(entry for entry in PACKAGED if entry.name not in names))


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
    entry = _entry_of(folder, KINDS) or _entry_of(folder, added_kinds())
    if entry is None:
        media = (kind for kind in all_kinds() if kind.media and _is_in_most(folder, kind.media))
        entry = next(media, None)
    if entry is None:
        raise DatasetNotFoundError(explain_missing(path))
    check_installed(entry, redact(path))
    return entry.name


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


_EXPECTED = [entry.expected for entry in KINDS if entry.expected]
_READABLE = f"expected {', '.join(_EXPECTED[:-1])} or {_EXPECTED[-1]}"
_BESIDE = tuple(suffix for entry in KINDS for suffix in entry.beside)

CONVERTED = "@refs/convert/parquet"
"""The revision of a dataset in which the hub keeps Parquet copies of other files."""

MAX_COMPARED_NAMES = 10_000
"""How many names in a folder are used to recognize it."""

MAX_ADVISED = 10
"""How many names of a folder a message lists."""

MAX_SEARCHED_LEVELS = 3
"""How many folders above a path are looked at: in stores, each takes requests."""

_WILDCARDS = "*?{"
"""In the names of shards that programs pass to webdataset, which reads them without an index."""

_CUT_SCHEME = re.compile(r"([a-z][a-z0-9]+):/?([^/].*)")

INTERRUPTED_PACK = (
    "has only the shards that an interrupted `energon pack` has written; run the same command again"
)

META_DOCUMENTS = ("dataset.yaml", "split.yaml", ".info.yaml")
"""Documents of a prepared dataset that could be taken for metadatasets."""


def explain_missing(path: str) -> str:
    """Return why there is no dataset at an address, and what to do or what is near it.

    Raises:
        DatasetNotFoundError: If not even the bucket exists.
        StorageError: If the store cannot be reached.
    """
    name = path.rpartition("/")[2]
    if name.endswith(".tar") and any(letter in name for letter in _WILDCARDS):
        return f"{redact(path)} {_advice_on_pattern(path)}"
    return _explain_remote(path) if is_remote(path) else _explain(path)


def _explain(path: str) -> str:
    if os.path.exists(path):
        return f"{path} {advice(path)}"
    if os.path.islink(path):
        return f"{path} is a link to {os.readlink(path)!r}, which does not exist"
    parent, name = os.path.split(os.path.normpath(path))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    parent = os.path.abspath(parent)
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
    for _ in range(MAX_SEARCHED_LEVELS):
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
    pack = f"`energon pack {shell_word(redact(path))} {_target(path)}`"
    is_bucket = is_remote(path) and not split_address(path).key
    if is_file(path) and not is_bucket:
        return _advice_on_file(path, pack)
    if not is_remote(path) and not os.access(path, os.R_OK | os.X_OK):
        is_there = os.path.exists(path) and not os.path.isdir(path)
        why = "it is not a regular file" if is_there else "permission denied"
        return f"cannot be read by this user: {why}"
    return _advice_on_folder(path, pack)


def _advice_on_file(path: str, pack: str) -> str:
    lines = name_of_lines(address_name(path))
    if lines is not None:
        return f"is compressed JSON; if each line is a sample, rename it to {lines}"
    if table_suffix(path):
        return f"is a table; {pack} makes a sample of each row"
    if path.endswith(".arrow"):
        return f"is an Arrow file; name its folder, {redact(parent_address(path)) or '.'}"
    if path.endswith(".tar"):
        folder = redact(path).rpartition("/")[0] or "."
        return f"is a shard; `energon prepare {shell_word(folder)}` makes a dataset of its folder"
    return f"is a file; {_READABLE}"


def _advice_on_pattern(path: str) -> str:
    owner = _dataset_above(path)
    if owner is not None:
        return f"is a pattern of shards; name their dataset, {redact(owner)}"
    folder = redact(path).rpartition("/")[0] or "."
    return (
        f"is a pattern of shards; `energon prepare {shell_word(folder)}` makes a dataset of their "
        "folder, and energon.webdataset streams them as they are"
    )


def _advice_on_folder(path: str, pack: str) -> str:
    shown = redact(path)
    names = list(islice(files_below(path), MAX_COMPARED_NAMES))
    inside = datasets_in(path)
    of_datasets = tuple(f"{path.rstrip('/')}/{each}/" for each in inside)
    if inside and all(name.startswith(of_datasets) for name in names):
        return f"contains prepared datasets; name one of them: {', '.join(inside[:MAX_ADVISED])}"
    names = [name.lower() for name in names if not name.endswith(_BESIDE)]
    if not names:
        return (
            f"holds no files; put tar shards into it and run `energon prepare {shell_word(shown)}`"
        )
    if is_file(join_address(path, PACK_RECORD)):
        return INTERRUPTED_PACK
    if any(name.endswith(".tar") for name in names):
        return f"has no .nv-meta/.info.json; run `energon prepare {shell_word(shown)}`"
    renamed = list(filter(None, map(name_of_lines, map(address_name, names))))
    if 2 * len(renamed) > len(names):
        return (
            "has compressed JSON files; if each line is a sample, rename them to names such as "
            f"{renamed[0]}"
        )
    if any(".tar." in name or name.endswith(".tgz") for name in names):
        return f"has compressed archives; {pack} makes shards of them"
    suffixes = Counter(os.path.splitext(name)[1] for name in names)
    kinds = ", ".join(suffix for suffix, _ in suffixes.most_common(3) if suffix)
    tables = sum(map(bool, map(table_suffix, names)))
    if path.startswith("hf://datasets/") and "@" not in path:
        root = split_address(path).root
        return f"has files ({kinds}); the hub may have Parquet copies of them: {root}{CONVERTED}"
    if any(name.endswith(".arrow") for name in names):
        return (
            "has Arrow files, but no valid state.json or dataset_dict.json, which save_to_disk "
            "writes beside them; save the dataset again, or copy the missing file"
        )
    if tables and 2 * tables > len(names):
        return f"has tables ({kinds}); {pack} makes a sample of each row; {_READABLE}"
    if kinds:
        return f"has files ({kinds}) and no shards; {pack} makes a dataset of them"
    return f"has no .nv-meta/.info.json; {_READABLE}"


def datasets_in(path: str) -> list[str]:
    """Return the names of the folders in a folder that are prepared datasets."""
    if is_remote(path):
        store, key = open_store(path)
        cut = len(key) + 1 if key else 0
        steps = (info.key[cut:].split("/") for info in store.first(key, MAX_COMPARED_NAMES))
        return sorted({each[0] for each in steps if each[1:2] == [META]})
    return sorted(name for name in names_in_folder(path) if _is_prepared(join_address(path, name)))


def _target(path: str) -> str:
    """Return a target for packing the files at an address: beside it."""
    if not is_remote(path):
        return shell_word(f"{os.path.splitext(os.path.normpath(path))[0]}_packed")
    if not split_address(path).key:
        return "TARGET"  # the names beside a bucket belong to others
    return shell_word(f"{os.path.splitext(redact(path).rstrip('/'))[0]}_packed")


def names_in_folder(folder: str) -> Sequence[str]:
    """Return some names directly in a folder; none if it cannot be listed."""
    if not is_remote(folder):
        try:
            return list(islice(os.listdir(folder), MAX_COMPARED_NAMES))
        except (OSError, ValueError):  # no path has a null byte
            return []
    store, key = open_store(folder)
    return store.names_in(key) if store.backend.can_list else []


def files_below(path: str) -> Iterator[str]:
    """Yield the paths of files below a folder, without those that begin with a dot."""
    if is_remote(path):
        store, key = open_store(path)
        infos = store.first(key, MAX_COMPARED_NAMES)
        root = split_address(path).root
        for each in infos:
            if not address_name(each.key).startswith("."):
                yield f"{root}/{each.key}"
        return
    if os.path.isdir(path):
        yield from (os.path.join(path, name) for name, _ in walk_files(path))
