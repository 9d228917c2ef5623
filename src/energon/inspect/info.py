"""Describe a dataset or metadataset as plain data."""

from __future__ import annotations

import os
from typing import Any

from energon.inspect.leaves import find_leaves
from energon.inspect.mix_info import describe_mix
from energon.io.address import address_name, is_remote, redact
from energon.metadataset.kind import dataset_kind
from energon.sources.file_store_open import folder_of
from energon.sources.folder_kind import describe_folder
from energon.sources.kinds import kind_named


def describe(
    path: str | os.PathLike[str],
    *,
    split_config: str = "split.yaml",
    dataset_config: str = "dataset.yaml",
    parts: bool = True,
) -> dict[str, Any]:
    """Return what a dataset or metadataset holds.

    Args:
        path: Where it is.
        split_config: File below `.nv-meta` that lists the splits.
        dataset_config: File below `.nv-meta` that describes samples.
        parts: Whether to count parts and their sizes, for which all indexes are read.

    Raises:
        DatasetNotFoundError: If there is nothing.
        ConfigError: If a document makes no sense.
    """
    address = os.fspath(path)
    folder = folder_of(address)
    if folder is not None:
        about = {"name": _name(folder), "path": redact(address), "kind": "filesystem"}
        return {**about, **describe_folder(folder, parts)}
    kind = dataset_kind(address)
    about = {"name": _name(address), "path": redact(address), "kind": kind}
    if kind == "metadataset":
        return {**about, **_metadataset(address, split_config, dataset_config, parts)}
    found = kind_named(kind).describe(
        address, split_config=split_config, dataset_config=dataset_config, parts=parts
    )
    return {**about, **found}


def _name(address: str) -> str:
    return address_name(address if is_remote(address) else os.path.realpath(address))


def _metadataset(
    address: str, split_config: str, dataset_config: str, parts: bool
) -> dict[str, Any]:
    found = find_leaves(
        address, split_config=split_config, dataset_config=dataset_config, training=True
    )
    datasets: dict[str, Any] = {}
    for leaves in found.splits.values():
        for leaf in leaves:
            if leaf.path not in datasets:
                datasets[leaf.path] = describe(
                    leaf.path,
                    split_config=leaf.split_config,
                    dataset_config=leaf.dataset_config,
                    parts=parts,
                )
    return {
        "splits": {name: describe_mix(mix) for name, mix in found.mixes.items()},
        "datasets": {redact(path): about for path, about in datasets.items()},
        "problems": [f"split {name!r}: {line}" for name, line in found.problems],
    }
