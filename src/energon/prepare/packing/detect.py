"""Find out what a path is that is to be packed."""

from __future__ import annotations

import json
from typing import Literal

from energon.errors import ConfigError, DatasetNotFoundError
from energon.io.epath import AnyPath, any_path
from energon.prepare.packing import shards, table
from energon.prepare.packing.huggingface import SCHEME
from energon.prepare.packing.place import names_below
from energon.prepare.packing.row import RowRules
from energon.prepare.packing.source import PackSource

Kind = Literal["folder", "table", "shards", "huggingface", "mds", "litdata"]
KINDS: tuple[Kind, ...] = ("folder", "table", "shards", "huggingface", "mds", "litdata")


def detect_kind(address: str) -> Kind:
    """Return what is at a path.

    Raises:
        DatasetNotFoundError: If there is nothing.
        ConfigError: If it is a file of an unknown kind.
    """
    if address.startswith(SCHEME):
        return "huggingface"
    path = any_path(address)
    if path.is_file():
        if path.suffix.lower() in table.SUFFIXES:
            return "table"
        raise ConfigError(f"{path}: wanted is a folder, or a table: {', '.join(table.SUFFIXES)}")
    if (path / "index.json").is_file():
        kind = _kind_of_index(path / "index.json")
        if kind is not None:
            return kind
    if not path.is_dir():
        raise DatasetNotFoundError(f"{path}: no such file or folder")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return "huggingface"
    if any(name.endswith(shards.SUFFIXES) for name in names_below(path)):
        return "shards"
    return "folder"


def open_source(
    address: str, kind: Kind, rules: RowRules, *, prefix_keys: bool = False
) -> PackSource:
    """Open what is to be packed.

    Args:
        address: A path, a URL, or `hf://NAME`.
        kind: What it is, see `detect_kind`.
        rules: How rows become samples, where it has rows.
        prefix_keys: Whether keys begin with the name of the shard that they were in.
    """
    if kind == "huggingface":
        from energon.prepare.packing.huggingface import HuggingFaceSource

        return HuggingFaceSource(address, rules)
    path = any_path(address)
    if kind == "folder":
        from energon.prepare.packing.folder import FolderSource

        return FolderSource(path)
    if kind == "table":
        return table.TableSource(path, rules)
    if kind == "shards":
        return shards.ShardSource(path, prefix_keys=prefix_keys)
    if kind == "mds":
        from energon.prepare.packing.mds import MdsSource

        return MdsSource(path, rules)
    from energon.prepare.packing.litdata import LitDataSource

    return LitDataSource(path, rules)


def _kind_of_index(path: AnyPath) -> Kind | None:
    try:
        index = json.loads(path.read_text())
    except ValueError:
        return None
    if not isinstance(index, dict):
        return None
    if "shards" in index:
        return "mds"
    return "litdata" if "chunks" in index else None
