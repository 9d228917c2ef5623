"""Describe a dataset or metadataset as plain data."""

from __future__ import annotations

import os
from typing import Any

from energon.errors import EmptyDatasetError
from energon.inspect.leaves import find_leaves
from energon.io.address import address_name, is_remote, local_path, redact
from energon.metadataset.kind import dataset_kind
from energon.metadataset.leaf import BlendMode, Leaf, LeafList
from energon.sources.files.open import folder_of
from energon.sources.folder_kind import describe_folder
from energon.sources.join import JoinedSource
from energon.sources.kinds import kind_named
from energon.sources.shards import ShardPool
from energon.task_encoder.open_join import find_index, join_digest


def describe_mix(mix: LeafList) -> dict[str, Any]:
    """Return what a split of a metadataset is made of.

    `samples` is None where that depends on the index of a join which is not there yet.
    """
    pool = ShardPool()
    leaves = [_leaf(leaf, mix, pool) for leaf in mix.leaves]
    known = all(leaf["samples"] is not None for leaf in leaves)
    about = {
        "samples": sum(leaf["samples"] for leaf in leaves) if known else None,
        "blend": mix.blend_mode.value,
        "leaves": leaves,
    }
    if mix.blend_mode is BlendMode.SAMPLE_REPETITIONS and known:
        about["samples_per_epoch"] = round(
            sum(leaf["samples"] * leaf["repetitions"] for leaf in leaves)
        )
    return about


def _leaf(leaf: Leaf, mix: LeafList, pool: ShardPool) -> dict[str, Any]:
    about: dict[str, Any] = {
        "path": redact(leaf.path),
        "split_part": leaf.split_part,
        "samples": _count_joined(leaf, pool) if leaf.join else _count(leaf, pool),
        "weight": leaf.weight if mix.blend_mode is BlendMode.DATASET_WEIGHT else None,
        "repetitions": leaf.repetitions,
        "subflavors": dict(leaf.subflavors),
        "aux": {name: redact(place) for name, place in leaf.aux.items()},
    }
    if leaf.join:
        about["join"] = [
            {
                "path": redact(member.leaf.path),
                "split_part": member.leaf.split_part,
                "nonmatch": member.nonmatch,
            }
            for member in leaf.join
        ]
    return about


def _count(leaf: Leaf, pool: ShardPool) -> int:
    try:
        return len(_open(leaf, pool))
    except EmptyDatasetError:
        return 0


def _count_joined(leaf: Leaf, pool: ShardPool) -> int | None:
    try:
        members = [_open(member.leaf, pool) for member in leaf.join]
        digest = join_digest(leaf, members)
        index = find_index(leaf, digest)
        if index is None:
            return None
        return len(JoinedSource(members, index, digest=digest, subsets=leaf.subsets))
    except EmptyDatasetError:
        return 0


def _open(leaf: Leaf, pool: ShardPool) -> Any:
    kind = kind_named(leaf.kind)
    return kind.open(leaf, kind.config(leaf), pool=pool)


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
    address = os.fspath(path) if is_remote(path) else local_path(path)
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
