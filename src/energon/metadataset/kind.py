"""What lies at a path: a dataset of which kind, or a metadataset."""

from __future__ import annotations

import os
from difflib import get_close_matches
from itertools import islice
from typing import Literal

from energon.errors import DatasetNotFoundError
from energon.io.address import address_name, is_remote, join_address, redact
from energon.io.files import is_file

DatasetKind = Literal["webdataset", "jsonl", "metadataset", "filesystem"]

_FILES: dict[str, DatasetKind] = {
    ".yaml": "metadataset",
    ".yml": "metadataset",
    ".jsonl": "jsonl",
}
_FOLDERS: dict[str, DatasetKind] = {
    ".info.json": "webdataset",
    ".info.yaml": "webdataset",
    "index.sqlite": "filesystem",
}

MAX_COMPARED = 10_000
"""Names of a folder among which the one is looked for that was meant."""


def dataset_kind(path: str | os.PathLike[str]) -> DatasetKind:
    """Return what is at `path`, looking at one file where a prepared dataset is.

    Raises:
        DatasetNotFoundError: If there is nothing that can be loaded.
        StorageError: If it is remote and cannot be reached.
    """
    path = os.fspath(path)
    suffix = os.path.splitext(address_name(path))[1]
    if suffix in _FILES and is_file(path):
        return _FILES[suffix]
    for name, kind in _FOLDERS.items():
        if is_file(join_address(path, f".nv-meta/{name}")):
            return kind
    raise DatasetNotFoundError(_explain_remote(path) if is_remote(path) else _explain(path))


def _explain_remote(path: str) -> str:
    shown = redact(path)
    if os.path.splitext(address_name(path))[1] in _FILES:
        return f"{shown} does not exist"
    return f"{shown} has no .nv-meta/.info.json; run `energon prepare {shown}`"


def _explain(path: str) -> str:
    if os.path.isdir(path):
        return f"{path} has no .nv-meta/.info.json; run `energon prepare {path}`"
    if os.path.isfile(path):
        return (
            f"{path} is a file; wanted is the folder of a prepared dataset, a metadataset "
            "(.yaml, .yml) or a .jsonl file"
        )
    parent, name = os.path.split(os.path.normpath(path))
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    parent = parent or "."
    return f"{path} does not exist: no {name!r} in {parent}{_proposal(name, parent)}"


def _proposal(name: str, folder: str) -> str:
    try:
        close = get_close_matches(name, islice(os.listdir(folder), MAX_COMPARED), 1, cutoff=0.75)
    except OSError:
        return ""
    return f", did you mean {close[0]!r}?" if close else ""
