"""Explain why there is no dataset at a path, and what to do with the files in it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from energon.errors import DatasetNotFoundError
from energon.formats.meta.info import META, PACK_RECORD
from energon.io.address import (
    address_name,
    is_remote,
    join_address,
    parent_address,
    redact,
    split_address,
)
from energon.io.backends.local import walk_files
from energon.io.files import describe_missing, is_file, open_store
from energon.messages import nearest, shell_word
from energon.metadataset.kind import KINDS, name_of_lines, table_suffix

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
    if is_file(path) and not _is_bucket(path):
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


def _is_bucket(path: str) -> bool:
    return is_remote(path) and not split_address(path).key


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
        except OSError:
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
